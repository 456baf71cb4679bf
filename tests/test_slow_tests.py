"""The list of slow tests, and the tool that makes it."""

import re
import xml.etree.ElementTree as ET

from tools import slow_tests


def case(module, name, seconds):
    return ET.Element("testcase", classname=module, name=name, time=str(seconds))


def test_what_is_listed_exists():
    for line in slow_tests.LIST.read_text().splitlines():
        file, *_, name = line.split("[")[0].split("::")
        source = (slow_tests.LIST.parent / file).read_text()
        assert re.search(rf"^ *def {name}\(", source, re.M), line


def test_what_is_to_stay_quick_exists():
    for test in slow_tests.CORE:
        file, name = test.split("[")[0].split("::")
        assert f"\ndef {name}(" in (slow_tests.LIST.parent / file).read_text(), test


def test_of_the_combinations_the_fastest_stays():
    select = "tests.sparse_collectives.test_select"
    found = slow_tests.slow_tests(
        [
            case("tests.test_package", "test_quick", 0.9),
            case("tests.test_package", "test_slow", 2.1),
            case("tests.test_package", "test_alone", 1.9),
            case(f"{select}.TestTopk", "test_one[a-[1]]", 5),
            case(f"{select}.TestTopk", "test_one[b]", 1.5),
            case(f"{select}.TestTopk", "test_one[c]", 1.6),
            case(f"{select}.TestTopk", "test_all[a]", 5),
            case(f"{select}.TestTopk", "test_all[b]", 4),
            case("tests.fuzz.test_fuzz", "test_laws_hold_for_a_few_configurations", 50),
        ]
    )
    assert found == [
        "sparse_collectives/test_select.py::TestTopk::test_all",
        "sparse_collectives/test_select.py::TestTopk::test_one[a-[1]]",
        "sparse_collectives/test_select.py::TestTopk::test_one[c]",
        "test_package.py::test_slow",
    ]


def test_a_test_that_is_listed_as_a_whole_needs_no_combinations():
    assert slow_tests.merged(["a::x[1]", "a::y[1]"], ["a::x", "a::y[2]"]) == [
        "a::x",
        "a::y[1]",
        "a::y[2]",
    ]
