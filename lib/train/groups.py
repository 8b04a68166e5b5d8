"""Which circuit a parameter belongs to, and optimiser groups with a rate per circuit.

The ratio of the rates of two circuits is this book's subject, so nothing is guessed here: each parameter has its circuit in a
table, and a name that is not in the table raises.
"""

from collections.abc import Callable, Mapping

import torch

from lib import checks

QK, OV, EMBEDDING, POSITION = "QK", "OV", "EMBEDDING", "POSITION"
CIRCUITS = (QK, OV, EMBEDDING, POSITION)

#: The classifier W_U, b_U reads what OV wrote and is the last factor of the output map: it counts as OV, as in the
#: published recipe, where it keeps the slow rate. Positions have a group of their own because the published recipe raises
#: them and the embedding together, and we want to be able to raise one of them.
CIRCUIT = {
    "W_Q": QK, "b_Q": QK, "W_K": QK, "b_K": QK,
    "W_V": OV, "b_V": OV, "W_O": OV, "b_O": OV, "W_U": OV, "b_U": OV,
    "E": EMBEDDING,
    "P": POSITION,
}  # fmt: skip


def circuit_of(name: str, extra: dict[str, str] | None = None) -> str:
    """The circuit of a parameter, by the last part of its dotted name.

    Args:
        name: such as 'W_Q' or 'blocks.0.attn.W_Q'.
        extra: further names and their circuits.

    Raises:
        ValueError: the name belongs to no circuit, or `extra` names an unknown circuit.

    Example:
        >>> circuit_of("blocks.0.attn.W_Q")
        'QK'
    """
    table = CIRCUIT | (extra or {})
    for known, circuit in table.items():
        checks.one_of("circuit_of", CIRCUITS, **{known: circuit})
    last = name.rsplit(".", 1)[-1]
    if last not in table:
        listed = "; ".join(f"{', '.join(n for n, c in table.items() if c == circuit)} → {circuit}" for circuit in CIRCUITS)
        raise ValueError(f"circuit_of: {name!r} belongs to no circuit. Known: {listed}. Add it to `extra` or freeze it.")
    return table[last]


def optimiser_groups(parameters: Mapping[str, torch.Tensor], rates: dict[str, float], extra: dict[str, str] | None = None) -> list[dict]:
    """Optimiser groups, one per circuit, for `torch.optim`.

    Args:
        parameters: name -> tensor.
        rates: circuit -> learning rate; every circuit that occurs must be there.
        extra: as in `circuit_of`.

    Returns:
        list of groups with keys params, names, circuit, lr (a schedule multiplies `base_lr`).

    Raises:
        ValueError: an unknown parameter or circuit, a circuit without a rate, a rate <= 0.
    """
    for circuit in rates:
        checks.one_of("optimiser_groups", CIRCUITS, circuit=circuit)
    checks.positive("optimiser_groups", **rates)
    members: dict[str, list[str]] = {circuit: [] for circuit in CIRCUITS}
    for name in parameters:
        members[circuit_of(name, extra)].append(name)
    missing = [circuit for circuit, names in members.items() if names and circuit not in rates]
    if missing:
        raise ValueError(
            f"optimiser_groups: no rate for {', '.join(missing)}; rates has {', '.join(rates) or 'none'}. Give one per circuit."
        )
    return [
        {"params": [parameters[n] for n in names], "names": names, "circuit": circuit, "lr": rates[circuit], "base_lr": rates[circuit]}
        for circuit, names in members.items()
        if names
    ]


def describe(groups: list[dict], say: Callable[[str], None] = print) -> None:
    """Print a line per group: circuit, number of tensors, number of parameters, rate."""
    for group in groups:
        size = sum(p.numel() for p in group["params"])
        say(
            f"{group['circuit']:9s} {len(group['params']):2d} tensors {size:9,d} parameters  "
            f"lr {group['base_lr']:.3g}  {', '.join(group['names'])}"
        )
