"""Every recorded answer of vLLM 0.33 in `cases/`, through `field_cases.answer`."""

import json
from pathlib import Path

import pytest

from tests.core.field_cases import SECTIONS, answer

CASES = Path(__file__).parent / "cases"


@pytest.mark.parametrize("section", SECTIONS)
def test_answers_are_as_recorded(section):
    lines = (CASES / f"{section}.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    wrong = [
        case | {"ours": ours}
        for case in cases
        if (ours := answer(section, case["in"])) != case["out"]
    ]
    assert cases and not wrong, f"{len(wrong)} of {len(cases)} differ, first {wrong[0]}"


def test_every_file_has_a_section():
    assert {file.stem for file in CASES.glob("*.jsonl")} == set(SECTIONS)
