"""Adds to tests/slow_tests.txt, which `make test` leaves out, what was slow in a run of the tests.

    make test ARGS=--junitxml=times.xml
    python tools/slow_tests.py times.xml

A test is slow that takes more than SECONDS. Of its combinations of parameters the fastest stays
quick, if it takes less than ALONE or is one of CORE. Tests share what is compiled, so that others
are slow in the next run: repeat it. To begin anew, empty the list.
"""

import collections
import pathlib
import sys
import xml.etree.ElementTree as ET

SECONDS, ALONE = 1.15, 2.0
ROOT = pathlib.Path(__file__).parent.parent
LIST = ROOT / "tests" / "slow_tests.txt"
# What would hurt most if it broke, once each.
CORE = (
    "test_readme.py::test_the_programs_run",
    "test_readme.py::test_the_programs_about_training_run",
    "test_docs_idea.py::test_the_page_tells_what_they_show",
    "test_docs_quick_start.py::test_the_programs_run",
    "test_examples_quick.py::test_a_language_model_learns_a_text_of_ones_own",
    "test_examples_quick.py::test_a_loop_of_ones_own_learns",
    "test_examples_quick.py::test_an_nnx_classifier_is_compared_with_the_dense_one",
    "test_examples_quick.py::test_nothing_that_waits_is_lost_with_other_workers",
    "test_examples_quick.py::test_the_notebook_runs_and_prints_what_it_shows",
    "test_examples_quick.py::test_the_quick_start_learns",
    "fuzz/test_fuzz.py::test_laws_hold_for_a_few_configurations",
    "optax_ext/test_checkpoint.py::test_the_step_after_a_restore_has_the_same_bits",
    "optax_ext/test_checkpoint_faults.py::test_a_damaged_checkpoint_is_an_error",
    "optax_ext/test_errors.py::test_a_sum_that_overflows_skips_the_step_too",
    "optax_ext/test_invariants.py::test_agreed_indices",
    "optax_ext/test_invariants.py::test_nothing_is_lost_and_all_workers_agree",
    "optax_ext/test_late_agreement.py::test_a_step_takes_one_collective_less[ok_topk-3-4]",
    "optax_ext/test_late_agreement.py::test_it_has_the_bits_of_an_agreement_before[ok_topk]",
    "optax_ext/test_limit.py::test_most_of_what_is_beyond_stays_and_nothing_is_lost",
    "optax_ext/test_lossy.py::test_what_a_codec_loses_is_in_the_residuals",
    "optax_ext/test_modes.py::test_mode_matches_the_oracle",
    "optax_ext/test_nonfinite.py::test_a_sum_that_overflows_stays_with_the_workers",
    "optax_ext/test_ok_topk_paper.py::test_every_step_is_that_of_the_paper",
    "optax_ext/test_nonfinite.py::test_after_a_sum_that_would_overflow_training_goes_on",
    "optax_ext/test_sharded.py::test_it_has_the_bits_of_unsharded_runs_of_the_same_parts"
    "[topk_a-automatic]",
    "optax_ext/test_sharded_program.py::test_no_device_holds_what_the_others_have",
    "optax_ext/test_sharded_state.py::test_a_checkpoint_continues_with_the_same_bits_and_on_other_"
    "meshes",
    "optax_ext/test_sharded_state.py::test_on_another_mesh_nothing_of_the_residuals_is_lost",
    "optax_ext/test_train_step.py::test_at_density_one_it_trains_like_the_dense_one",
    "optax_ext/test_train_step.py::test_one_trace_and_one_program_for_all_steps",
    "optax_ext/test_works_with.py::test_at_density_a_tenth_nothing_is_lost_and_no_worker_drifts",
    "sparse_collectives/test_allreduce_contract.py::test_nothing_is_lost_and_all_workers_agree"
    "[ok_topk-3]",
    "sparse_collectives/test_ok_topk.py::test_windows_and_rounds_select_the_same",
    "sparse_collectives/test_ok_topk_lossy.py::test_nothing_is_lost_and_all_workers_agree",
    "sparse_collectives/test_ok_topk_sizes.py::test_a_step_takes_the_shortest_that_has_room",
    "sparse_collectives/test_platform.py::test_selectors_step_after_step",
    "sparse_collectives/test_starvation.py::test_no_index_starves_in_an_algorithm",
)


def identity(case: ET.Element) -> tuple[str, str]:
    """The test, as its path in tests/ and its name, and that with the parameters."""
    module, name = case.get("classname", ""), case.get("name", "")
    parts = module.removeprefix("tests.").split(".")
    size = next(i for i in range(len(parts), 0, -1) if _file(parts[:i]).is_file())
    path = _file(parts[:size]).relative_to(LIST.parent).as_posix()
    prefix = "::".join([path, *parts[size:]])
    return f"{prefix}::{name.split('[')[0]}", f"{prefix}::{name}"


def _file(parts: list[str]) -> pathlib.Path:
    return LIST.parent.joinpath(*parts).with_suffix(".py")


def slow_tests(cases: list[ET.Element]) -> list[str]:
    """What takes too long; a test of which nothing stays is named without its parameters."""
    times = collections.defaultdict(list)
    for case in cases:
        test, combination = identity(case)
        times[test].append((float(case.get("time", 0)), combination))
    slow: list[str] = []
    for test, combinations in times.items():
        fastest, kept = min(combinations)
        if fastest > ALONE and test not in CORE:
            slow.append(test)
            continue
        slow += [name for seconds, name in combinations if seconds > SECONDS and name != kept]
    return sorted(set(slow) - set(CORE))


def merged(*lists: list[str]) -> list[str]:
    """All of them, without the combinations of a test that is in one as a whole."""
    names = {name for names in lists for name in names}
    return sorted(name for name in names if "[" not in name or name.split("[")[0] not in names)


def main(path: str) -> None:
    """Writes the list."""
    found = slow_tests(list(ET.parse(path).iter("testcase")))
    names = merged(LIST.read_text().splitlines(), found)
    LIST.write_text("".join(f"{name}\n" for name in names))
    print(f"{len(names)} lines in {LIST.relative_to(ROOT)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
