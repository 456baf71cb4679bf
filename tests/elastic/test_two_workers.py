"""On every version of jax: one of two workers dies, the other goes on, and the first comes back."""

from benchmarks.elastic.cluster import cluster


def test_one_dies_and_comes_back():
    with cluster(
        "tests.elastic._worker", 2, heartbeat=8, collective=10, pause=0.05, steps=1_000_000
    ) as of:
        of.wait_for_step(6)
        # Process 0: the coordinator is another process.
        of.kill(0)
        at = of.step_of(1)
        of.wait_for_step(at + 5, [1])
        assert of.lives[1][-1].events[-1]["members"] == [1]
        of.start(0)
        of.wait_for("its step", lambda: of.lives[0][-1].find("step"))
        first = of.lives[0][-1].find("step")
        assert first["members"] == [0, 1]
        other = of.lives[1][-1]
        of.wait_for("the same step", lambda: other.find("step", step=first["step"]))
        assert other.find("step", step=first["step"])["digest"] == first["digest"]
        assert other.events[-1]["lost"][0]["process_id"] == 0
