"""Wrong stages that a kernel holds in rows sorted by experts, and what it has in place of them."""

from __future__ import annotations

import numpy as np
import pytest
import triton

from lastbit.diagnosing.inner_stages import _in_parts, _table, _taken
from lastbit.interpret import install
from lastbit.numerics.residues import Residues
from lastbit.tracing import Event
from tests.diagnosing.test_mends_in_memory import traced

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

WEIGHTS = " ".join(
    [
        *(f"{name}_proj=bf16[3,20,16]" for name in ("gate", "up")),
        "down_proj=bf16[3,16,20]",
        *(f"{name}_lora_{side}" for name in ("gate", "up") for side in ("a=bf16[3,4,16]", "b=bf16[3,20,4]")),
        "down_lora_a=bf16[3,4,20] down_lora_b=bf16[3,16,4]",
    ]
)
IDS = "expert_ids=int64[5,2]:experts_3 routing_weights=fp32[5,2]"
FORWARD = f"moe_lora x=bf16[5,16] {IDS} {WEIGHTS} scaling=0.5 seed=3"
BACKWARD = (
    f"moe_lora_backward x=bf16[5,16] {IDS} grad_output=bf16[5,16] saved_gate=bf16[5,2,20] saved_up=bf16[5,2,20] "
    f"intermediate=bf16[5,2,20] {WEIGHTS} scaling=0.5 seed=3"
)


def test_the_line_of_a_stage_in_sorted_rows_that_a_gradient_of_weights_rests_on() -> None:
    found = traced("moe_lora_backward: grad_up without sigmoid", BACKWARD)
    assert (found.until, found.since) == ("grad_up", ("grad_intermediate",))
    assert any("moe_lora_gradients.py" in span for span in found.between) and len(found.between) < 3


@pytest.mark.parametrize(
    ("name", "line", "held", "until"),
    [
        ("moe_lora_backward: gradients of gate and up swapped", BACKWARD, "grad_up", "grad_gate"),
        ("moe_lora: adapters left out", FORWARD, "gate_base", "gate"),
    ],
)
def test_a_right_stage_in_place_of_another(name: str, line: str, held: str, until: str) -> None:
    found = traced(name, line)
    assert found.blamed is None and (found.held, found.until) == (held, until)


def test_numbers_that_several_elements_have_tell_none_of_them() -> None:
    import torch

    numbers = torch.arange(12.0).double()
    numbers[11] = 3.0
    table = _table(Residues.of(numbers).p)
    assert table is not None and sorted(table[1].tolist()) == [1, 2, *range(4, 11)]
    assert _table(Residues.of(numbers[:5]).p) is None


def test_an_element_that_was_taken_for_two_has_no_place() -> None:
    places, lanes = np.array([4, 5, 5, -1]), np.array([0, 1, 1, 2])
    assert _taken(places, lanes, 4).tolist() == [4, 5, -1, -1]
    assert _taken(places, np.array([0, 0, 1, 2]), 3).tolist() == [-1, 5, -1]


def test_events_of_one_text_that_compute_one_element_twice_are_of_two_tensors() -> None:
    events = {
        n: Event(n, "fadd", (), n, "fp32", np.zeros(2), program=(launch, (0, 0, 0)))
        for n, launch in ((1, 0), (2, 0), (3, 1), (4, 2))
    }
    places = {1: np.array([0, 1]), 2: np.array([2, 3]), 3: np.array([4, 5]), 4: np.array([0, 1])}
    assert [list(part) for part in _in_parts(events, places)] == [[1, 2, 3], [4]]
