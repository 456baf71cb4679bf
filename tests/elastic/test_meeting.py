"""Which processes take part and from which state, decided by their reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_ext.elastic import _meeting
from optax_ext.elastic._meeting import Report, decide


def has(*versions: int, model: str = "m", **more) -> Report:
    return Report(model, versions, tuple(10 * x for x in versions), **more)


NEW = Report("m")


def test_all_begin_together_with_the_parameters_of_the_first():
    decision = decide({2: NEW, 0: NEW, 1: NEW})
    assert decision.members == (0, 1, 2)
    assert (decision.holders, decision.version, decision.step, decision.saved) == ((0,), 0, 0, -1)
    assert not decision.lost
    assert not decision.refused


def test_a_failed_step_is_taken_from_the_state_that_all_have():
    decision = decide({0: has(8, 7), 1: has(7, 6)})
    assert (decision.version, decision.step, decision.holders) == (7, 70, (0, 1))
    # All have finished it: it is not taken again.
    assert decide({0: has(8, 7), 1: has(8, 7)}).version == 8


def test_a_newcomer_is_no_reason_to_go_back():
    decision = decide({0: has(8, 7), 1: NEW, 2: has(8)})
    assert (decision.version, decision.holders, decision.members) == (8, (0, 2), (0, 1, 2))


def test_one_that_is_too_far_behind_begins_as_a_newcomer():
    decision = decide({0: has(8, 7), 1: has(5, 4), 2: has(8, 7)})
    assert (decision.version, decision.holders, decision.lost) == (8, (0, 2), (1,))
    assert decision.members == (0, 1, 2)


def test_one_that_leaves_is_no_member():
    decision = decide({0: has(8), 1: Report("m", leaves=True)})
    assert decision.members == (0,)
    # It has handed over before version 8.
    decision = decide({0: has(8, 7), 1: has(8, 7, leaves=True), 2: has(8, 7)})
    assert (decision.members, decision.version, decision.lost) == ((0, 2), 8, ())


def test_one_whose_residual_others_did_not_get_goes_back_with_them():
    decision = decide({0: has(7, 6), 1: has(8, 7, leaves=True), 2: has(8, 7)})
    assert (decision.members, decision.holders, decision.version) == ((0, 1, 2), (0, 1, 2), 7)
    # No other process has a state.
    decision = decide({0: NEW, 1: has(8, 7, leaves=True)})
    assert (decision.members, decision.holders, decision.version) == ((0, 1), (1,), 8)


def test_another_model_is_refused_by_those_that_have_a_state():
    decision = decide({0: Report("other"), 1: has(8), 2: NEW})
    assert decision.members == (1, 2)
    assert decision.refused == {0: "it trains other, and process 1 m"}
    # If no process has one, the first decides.
    assert decide({0: NEW, 1: Report("other")}).members == (0,)


def test_a_checkpoint_is_for_those_that_have_nothing():
    decision = decide({0: NEW._replace(saved=300), 1: NEW._replace(saved=300)})
    assert (decision.saved, decision.step, decision.version) == (300, 300, 0)
    # A process that does not see it learns so when it reads.
    for seen in ({0: 300, 1: -1}, {0: -1, 1: 300}, {0: 200, 1: 300}):
        decision = decide({process: NEW._replace(saved=saved) for process, saved in seen.items()})
        assert (decision.saved, decision.step, decision.members) == (300, 300, (0, 1))
    decision = decide({0: NEW._replace(saved=300), 1: has(4)})
    assert (decision.saved, decision.step, decision.holders) == (-1, 40, (1,))


def _reports():
    versions = st.one_of(
        st.just(()), st.integers(0, 6).map(lambda v: (v,) if v == 0 else (v, v - 1))
    )
    one = st.builds(
        lambda v, leaves, model, saved: Report(model, v, tuple(10 * x for x in v), leaves, saved),
        versions,
        st.booleans(),
        st.sampled_from(["m", "n"]),
        st.integers(-1, 3),
    )
    return st.dictionaries(st.integers(0, 7), one, min_size=1)


@given(_reports())
def test_every_decision_can_be_followed(reports):
    decision = decide(reports)
    assert _meeting.decision_of(_meeting.written(decision)) == decision
    for report in reports.values():
        assert _meeting.report_of(_meeting.written(report)) == report
    members = {*decision.members}
    assert {*decision.holders} <= members
    assert bool(decision.holders) == bool(members)
    assert members.isdisjoint(decision.refused)
    # Each process is a member, refused, or gone.
    gone = {*reports} - members - {*decision.refused}
    assert all(reports[p].leaves for p in gone)
    # Others go on with what it has handed over.
    assert all(decision.version == reports[p].versions[0] for p in gone if reports[p].versions)
    assert members.isdisjoint(p for p, x in reports.items() if x.leaves and not x.versions)
    having = {p for p in members if reports[p].versions}
    if having:
        assert {*decision.holders} == {p for p in having if decision.version in reports[p].versions}
        assert {*decision.lost} == having - {*decision.holders}
        assert decision.saved == -1


@pytest.mark.parametrize(("size", "each"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_each_meeting_has_other_devices_until_all_are_used(size, each):
    decision = decide(dict.fromkeys(range(size), NEW))
    groups = [
        _meeting.assigned(decision._replace(number=number), lambda x: [(x, d) for d in range(each)])
        for number in range(1, size * each**size + 2)
    ]
    *given, last = (group and (*group.values(),) for group in groups)
    # One worker alone has no group that can break.
    assert (last is None) == (size > 1)
    assert len({*given}) == (len(given) if size > 1 else each)


def test_no_two_meetings_have_the_same_mark():
    nonces = [{0: NEW._replace(nonce=x), 1: NEW._replace(nonce=y)} for x, y in ("ab", "cb", "db")]
    assert len({decide(reports).mark for reports in nonces}) == 3
