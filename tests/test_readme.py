"""The README says what is true: its table comes from the rules, its code runs."""

import re
from pathlib import Path

import pytest

from qdelta_jax import RULES

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", list(RULES))
def test_the_table_has_a_row_for_each_rule(name):
    rule = RULES[name]
    gates = ", ".join(f"{gate} ({spec.axis})" for gate, spec in rule.gates.items()) or "-"
    assert f"| `{name}` | `{rule.__doc__.splitlines()[0].strip()}` | {gates} | {rule.source} |" in README


def test_the_python_code_runs_in_order():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (2, 1000, 4, 64)
    assert names["outs"].shape == (5, 2, 1000, 4, 64)
    assert names["logits"].shape == (1, 100, 257)
    assert names["text"].tokens.shape == (2, 8)
