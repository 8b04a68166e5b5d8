"""Typing of parameters by circuit, and optimiser groups: nothing is guessed, nothing is left out."""

import pytest
import torch

from lib.models import agreement
from lib.train import groups


def parameters():
    return agreement.initial(agreement.Shape(vocabulary=11, d_model=6, heads=2, d_head=3, positions=7), [0])


def test_every_parameter_of_the_agreement_model_has_its_circuit():
    found = {name: groups.circuit_of(name) for name in parameters()}
    assert found == {
        "E": "EMBEDDING", "P": "POSITION", "W_Q": "QK", "W_K": "QK", "b_Q": "QK", "b_K": "QK",
        "W_V": "OV", "W_O": "OV", "W_U": "OV", "b_V": "OV", "b_O": "OV", "b_U": "OV",
    }  # fmt: skip
    assert groups.circuit_of("blocks.3.attn.W_K") == "QK"


def test_unknown_parameter_is_refused_with_what_is_known():
    want = r"'blocks.0.attn.rel_bias' belongs to no circuit. Known: W_Q, b_Q, W_K, b_K → QK; .*Add it to `extra` or freeze it"
    with pytest.raises(ValueError, match=want):
        groups.circuit_of("blocks.0.attn.rel_bias")
    assert groups.circuit_of("blocks.0.attn.rel_bias", {"rel_bias": "QK"}) == "QK"
    with pytest.raises(ValueError, match=r"rel_bias = 'KQ'; expected one of 'QK'"):
        groups.circuit_of("W_Q", {"rel_bias": "KQ"})


def test_groups_hold_each_parameter_once_with_the_rate_of_its_circuit():
    p = parameters()
    found = groups.optimiser_groups(p, {"QK": 1.0, "OV": 0.1, "EMBEDDING": 2.0, "POSITION": 3.0})
    assert sorted(name for group in found for name in group["names"]) == sorted(p)
    assert {name: group["lr"] for group in found for name in group["names"]}["W_K"] == 1.0
    assert {name: group["lr"] for group in found for name in group["names"]}["W_U"] == 0.1
    torch.optim.AdamW([{"params": group["params"], "lr": group["lr"]} for group in found])


@pytest.mark.parametrize(
    "rates, message",
    [
        ({"QK": 1.0, "OV": 1.0, "EMBEDDING": 1.0}, r"no rate for POSITION"),
        ({"QK": 0.0, "OV": 1.0, "EMBEDDING": 1.0, "POSITION": 1.0}, r"QK = 0; expected a finite number > 0"),
        ({"KQ": 1.0}, r"circuit = 'KQ'"),
    ],
)
def test_bad_rates_are_named(rates, message):
    with pytest.raises(ValueError, match=message):
        groups.optimiser_groups(parameters(), rates)


def test_printed_table_has_a_line_per_group_with_counts_and_rate():
    lines = []
    groups.describe(groups.optimiser_groups(parameters(), dict.fromkeys(groups.CIRCUITS, 0.01)), lines.append)
    assert len(lines) == 4
    assert lines[0].split()[:3] == ["QK", "4", "tensors"]
    assert "84 parameters" in lines[0]  # 2 heads × (6×3 + 3), for Q and for K
    assert "lr 0.01" in lines[0]
