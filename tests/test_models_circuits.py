"""The two circuits: hand-computed cases, parity with PyTorch's attention, twins, typing of parameters, bad input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot, scaled_dot_product_attention

from lib.data.two_pools import TwoPools
from lib.models.circuits import CODES, TwoCircuits, circuit_of, parse_code, twin
from lib.theory import factorising
from lib.theory.population import Population, gradients

VOCABULARY, OUTPUTS, HIDDEN, BATCH, KEYS = 11, 5, 13, 7, 3  # distinct primes: a swapped axis can't pass
EXACT = {"rtol": 0, "atol": 1e-12}


def data(seed=0, ensemble=()):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randint(VOCABULARY, (*ensemble, BATCH), generator=generator)
    tokens = torch.randint(VOCABULARY, (*ensemble, BATCH, KEYS), generator=generator)
    label = torch.randint(OUTPUTS, (*ensemble, BATCH), generator=generator)
    return query, tokens, label


def build(code, **options):
    return TwoCircuits.from_code(code, VOCABULARY, OUTPUTS, **({"hidden": HIDDEN, "init_scale": 3.0} | options))


def counts_of(tokens):
    return one_hot(tokens, VOCABULARY).sum(-2)


@pytest.mark.claim("P1-CIRCUITS")
def test_two_keys_with_scores_zero_and_log_three_get_a_quarter_and_three_quarters():
    w_qk = torch.zeros(3, 3, dtype=torch.float64)
    w_qk[2, 1] = math.log(3)  # query 2 scores key 0 with 0 and key 1 with ln 3
    w_ov = torch.tensor([[8.0, 0.0], [0.0, 16.0], [0.0, 0.0]], dtype=torch.float64)
    model = TwoCircuits.from_weights(W_QK=w_qk, W_OV=w_ov)
    query, tokens = torch.tensor([2]), torch.tensor([[0, 1]])
    assert model.pattern(query, tokens=tokens).tolist()[0] == pytest.approx([0.25, 0.75], abs=1e-15)
    assert model(query, tokens=tokens).tolist()[0] == pytest.approx([2.0, 12.0], abs=1e-14)
    # the query is a row index: read the other way round the score would be 0
    assert model.pattern(torch.tensor([1]), tokens=torch.tensor([[0, 2]])).tolist()[0] == [0.5, 0.5]


@pytest.mark.claim("P1-CIRCUITS")
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("init", ["random", "balanced"])
def test_all_four_equal_torch_scaled_dot_product_attention(code, init):
    model = build(code, init=init, seed=3, score_scale=0.7)
    query, tokens, _ = data(1)
    x, x_query = one_hot(tokens, VOCABULARY).double(), one_hot(query, VOCABULARY).double()
    if model.attention == "factorised":
        q, k = x_query @ model.W_Q, x @ model.W_K
    else:
        q, k = x_query @ model.W_QK, x
    v = x @ model.W_V @ model.W_O if model.output == "factorised" else x @ model.W_OV
    theirs = scaled_dot_product_attention(q[:, None], k, v, scale=0.7)[:, 0]
    torch.testing.assert_close(model(query, tokens=tokens), theirs, **EXACT)


@pytest.mark.claim("P1-CIRCUITS")
@pytest.mark.parametrize("start", CODES)
@pytest.mark.parametrize("code", CODES)
def test_twins_compute_the_same_function(start, code):
    model = build(start, ensemble=(2,), seed=5)
    other = twin(model, code, hidden=17)
    query, tokens, label = data(2)
    assert other.code == code
    for method in ("pattern", "forward"):
        torch.testing.assert_close(getattr(other, method)(query, tokens=tokens), getattr(model, method)(query, tokens=tokens), **EXACT)
    torch.testing.assert_close(other.loss(query, label, tokens=tokens), model.loss(query, label, tokens=tokens), **EXACT)


def test_twins_have_weights_of_their_own():
    model = build("FACO")
    other = twin(model, "FAFO")
    with torch.no_grad():
        other.W_Q += 1
    assert not torch.equal(model.W_Q, other.W_Q)


def test_a_split_twin_is_balanced():
    other = twin(build("CACO", seed=2), "FAFO")
    for left, right in ((other.W_Q, other.W_K.mT), (other.W_V, other.W_O)):
        torch.testing.assert_close(left.mT @ left, right @ right.mT, **EXACT)


def test_no_twin_below_the_rank_of_a_circuit():
    with pytest.raises(ValueError, match=r"twin: a circuit of rank 11 with hidden = 7; expected hidden >= 11"):
        twin(build("CACO"), "FACO", hidden=7)
    low = TwoCircuits.from_weights(W_QK=torch.ones(3, 3, dtype=torch.float64), W_OV=torch.eye(3, dtype=torch.float64))
    assert twin(low, "FACO", hidden=1).W_Q.shape == (3, 1)


@pytest.mark.parametrize("code", CODES)
def test_counts_say_all_that_the_tokens_say(code):
    model = build(code, ensemble=(2, 3), seed=1)
    query, tokens, label = data(4)
    counts = counts_of(tokens)
    torch.testing.assert_close(model(query, counts=counts), model(query, tokens=tokens), **EXACT)
    ours = [
        torch.autograd.grad(model.loss(query, label, **form).sum(), list(model.parameters()))
        for form in ({"counts": counts}, {"tokens": tokens})
    ]
    for a, b in zip(*ours, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    mass = model.pattern(query, counts=counts)  # [*ensemble, batch, vocabulary]
    positions = model.pattern(query, tokens=tokens)
    summed = torch.zeros_like(mass).scatter_add(-1, tokens.expand(2, 3, BATCH, KEYS), positions)
    torch.testing.assert_close(mass, summed, **EXACT)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), code=st.sampled_from(CODES), scale=st.floats(0.1, 30), shift=st.floats(-50, 50))
def test_pattern_rows_sum_to_one_and_ignore_a_shift_of_all_scores(seed, code, scale, shift):
    model = build(code, seed=seed, init_scale=scale)
    query, tokens, _ = data(seed)
    pattern = model.pattern(query, tokens=tokens)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(BATCH, dtype=torch.float64), **EXACT)
    torch.testing.assert_close((model.attention_scores(query, tokens) + shift).softmax(-1), pattern, rtol=0, atol=1e-11)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_scores_unchanged_when_the_hidden_basis_rotates(seed):
    model = build("FAFO", seed=seed)
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q
    turned = TwoCircuits.from_weights(W_Q=model.W_Q @ basis, W_K=model.W_K @ basis, W_V=model.W_V @ basis, W_O=basis.mT @ model.W_O)
    query, tokens, _ = data(seed)
    torch.testing.assert_close(turned(query, tokens=tokens), model(query, tokens=tokens), rtol=0, atol=1e-10)


def test_order_of_the_keys_moves_the_pattern_and_leaves_the_logits():
    model = build("FAFO")
    query, tokens, _ = data(6)
    torch.testing.assert_close(model.pattern(query, tokens=tokens.flip(-1)), model.pattern(query, tokens=tokens).flip(-1), **EXACT)
    torch.testing.assert_close(model(query, tokens=tokens.flip(-1)), model(query, tokens=tokens), **EXACT)


def test_circuits_read_row_vectors():
    model = build("FAFO", seed=8)
    query, tokens, _ = data(7)
    x, x_query = one_hot(tokens, VOCABULARY).double(), one_hot(query, VOCABULARY).double()
    scores = torch.einsum("bi,ij,bkj->bk", x_query, model.qk_circuit, x)
    torch.testing.assert_close(model.attention_scores(query, tokens), scores, **EXACT)
    seen = torch.einsum("bk,bkj->bj", scores.softmax(-1), x)
    torch.testing.assert_close(model(query, tokens=tokens), seen @ model.ov_circuit, **EXACT)
    assert model.qk_circuit.shape == (VOCABULARY, VOCABULARY)
    assert model.ov_circuit.shape == (VOCABULARY, OUTPUTS)


@pytest.mark.parametrize("code", CODES)
def test_an_ensemble_is_its_members(code):
    seeds = [3, 5, 8]
    together = build(code, ensemble=(2, 3), seed=seeds)
    query, tokens, _ = data(9, ensemble=(2, 3))
    out = together(query, tokens=tokens)
    assert out.shape == (2, 3, BATCH, OUTPUTS)
    for i in range(2):
        for j, seed in enumerate(seeds):
            alone = build(code, seed=seed)
            torch.testing.assert_close(out[i, j], alone(query[i, j], tokens=tokens[i, j]), **EXACT)
    assert torch.equal(build(code, ensemble=(2,), seed=4).qk_circuit[1], build(code, seed=5).qk_circuit)


def test_one_seed_starts_all_four_codes_as_one_function_when_balanced():
    query, tokens, _ = data(1)
    outs = [build(code, init="balanced", seed=2)(query, tokens=tokens) for code in CODES]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], **EXACT)
    assert not torch.allclose(outs[0], build("FAFO", init="balanced", seed=3)(query, tokens=tokens))


def test_initial_values_are_those_named():
    random = build("FAFO", init_scale=1.0)
    for name, rows in (("W_Q", VOCABULARY), ("W_K", VOCABULARY), ("W_V", VOCABULARY), ("W_O", HIDDEN)):
        largest = random.get_parameter(name).abs().max().item() * math.sqrt(rows)
        assert 0.9 < largest <= 1
    assert not torch.equal(random.W_Q, random.W_K)
    zero = build("FAFO", init="zero")
    assert all(not p.any() for p in zero.parameters())
    identity = build("FAFO", init="identity", init_scale=0.5, label_tokens=[9, 1, 0, 4, 6])
    assert torch.equal(identity.qk_circuit, 0.25 * torch.eye(VOCABULARY, dtype=torch.float64))
    labels = identity.ov_circuit.nonzero().tolist()
    assert labels == [[0, 2], [1, 1], [4, 3], [6, 4], [9, 0]]
    assert build("CACO", dtype=torch.float32).W_OV.dtype == torch.float32


@pytest.mark.claim("P1-RESC")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_step_on_the_factors_moves_both_circuits_as_the_theory_says(seed):
    """The identities on the real attention loss: gradients of a collapsed twin, a step of SGD on the factors."""
    model = build("FAFO", seed=seed, init_scale=1.5)
    collapsed = twin(model, "CACO")
    query, tokens, label = data(seed)
    collapsed.loss(query, label, tokens=tokens).backward()
    eta_qk, eta_ov = 0.7, 0.3
    pairs = {  # circuit -> left, right, gradient in the product, rate
        "qk": (model.W_Q, model.W_K.mT, collapsed.W_QK.grad, eta_qk),
        "ov": (model.W_V, model.W_O, collapsed.W_OV.grad, eta_ov),
    }
    predicted = {
        name: factorising.product_step(left.detach().numpy(), right.detach().numpy(), gradient.numpy(), rate)
        for name, (left, right, gradient, rate) in pairs.items()
    }
    before = {"qk": model.qk_circuit.detach().numpy(), "ov": model.ov_circuit.detach().numpy()}
    optimiser = torch.optim.SGD(model.parameter_groups(eta_qk, eta_ov))
    model.loss(query, label, tokens=tokens).backward()
    optimiser.step()
    after = {"qk": model.qk_circuit.detach().numpy(), "ov": model.ov_circuit.detach().numpy()}
    for name in before:
        change = after[name] - before[name]
        assert np.abs(change).max() > 1e-3
        np.testing.assert_allclose(change, predicted[name], rtol=0, atol=1e-12)


@pytest.mark.claim("P1-CIRCUITS")
@pytest.mark.parametrize("code", CODES)
def test_loss_and_gradients_equal_the_exact_population_of_the_theory(code):
    """Two implementations that share no line: autograd over every sequence, and sums over enumerated counts by hand."""
    law = TwoPools(classes=3, pool=4, common_pool=5, distinct_slots=2, common_slots=3, queries=2, replacement=False)
    theirs = Population(classes=3, pool=4, common_pool=5, distinct=2, common=3, queries=2, replacement=False)
    model = TwoCircuits.from_code(code, law.vocabulary, law.classes, hidden=7, init_scale=3.0, seed=1)
    everything = law.every_sequence()
    loss = model.loss(*(torch.as_tensor(x) for x in (everything.query, everything.label)), tokens=torch.as_tensor(everything.tokens))
    loss.backward()
    queries, keys = law.query_ids.ravel(), slice(0, theirs.keys)  # the theory keeps only the rows that can be asked or read
    rows = {"W_Q": queries, "W_K": keys, "W_V": keys, "W_OV": keys, "W_O": slice(None), "W_QK": np.ix_(queries, np.arange(theirs.keys))}
    ours = {name: value.detach().numpy()[rows[name]] for name, value in model.named_parameters()}
    expected, slopes = gradients(theirs, ours)
    assert abs(loss.item() - expected) < 1e-12
    for name, parameter in model.named_parameters():
        assert np.abs(slopes[name]).max() > 1e-3
        np.testing.assert_allclose(parameter.grad.numpy()[rows[name]], slopes[name], rtol=0, atol=1e-12)


def test_loss_is_each_members_own_cross_entropy():
    model = build("CAFO", ensemble=(2,))
    query, tokens, label = data(3)
    loss = model.loss(query, label, tokens=tokens)
    for i in range(2):
        theirs = torch.nn.functional.cross_entropy(model(query, tokens=tokens)[i], label)
        torch.testing.assert_close(loss[i], theirs, **EXACT)


def test_every_parameter_has_a_circuit_and_its_rate():
    for code in CODES:
        model = build(code)
        groups = model.parameter_groups(eta_qk=0.5, eta_ov=0.125)
        assert {g["circuit"]: g["lr"] for g in groups} == {"QK": 0.5, "OV": 0.125}
        names = [name for g in groups for name in g["names"]]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        assert all(p is model.get_parameter(n) for g in groups for p, n in zip(g["params"], g["names"], strict=True))
    assert [circuit_of(n) for n in ("W_Q", "W_K", "layer.W_QK", "W_V", "W_O", "a.b.W_OV")] == ["QK"] * 3 + ["OV"] * 3


def test_codes_name_the_attention_side_first():
    assert parse_code("CAFO") == ("collapsed", "factorised")
    assert parse_code("FACO") == ("factorised", "collapsed")
    assert [build(code).code for code in CODES] == list(CODES)
    assert {name for name, _ in build("FACO").named_parameters()} == {"W_Q", "W_K", "W_OV"}


def test_a_given_pattern_is_read_by_ov():
    model = build("CACO", ensemble=(2,))
    query, tokens, _ = data(5)
    pattern = model.pattern(query, tokens=tokens)
    torch.testing.assert_close(model.logits(pattern, tokens=tokens), model(query, tokens=tokens), **EXACT)
    mass = model.pattern(query, counts=counts_of(tokens))
    torch.testing.assert_close(model.logits(mass), model(query, tokens=tokens), **EXACT)


BAD_BUILDS = [
    ({"vocabulary": 0}, "vocabulary = 0"), ({"outputs": 0}, "outputs = 0"), ({"hidden": 0}, "hidden = 0"),
    ({"attention": "fused"}, "attention = 'fused'; expected one of 'factorised', 'collapsed'"), ({"output": "CO"}, "output = 'CO'"),
    ({"init": "xavier"}, "init = 'xavier'"), ({"init_scale": 0.0}, "init_scale = 0"), ({"init_scale": math.nan}, "init_scale = nan"),
    ({"score_scale": -1.0}, "score_scale = -1"), ({"ensemble": (0,)}, "ensemble = 0"), ({"seed": -1}, "seed = -1"),
    ({"seed": [1, 2, 3], "ensemble": (2,)}, "broadcasts to ensemble"), ({"dtype": torch.int64}, "floating type"),
    ({"init": "identity", "label_tokens": [1, 1, 2, 3, 4]}, "5 different ids"),
    ({"init": "identity", "label_tokens": [0, 1, 2, 3, 11]}, "below vocabulary = 11"),
    ({"init": "balanced", "hidden": 7}, "expected hidden >= 11"),
]  # fmt: skip


@pytest.mark.parametrize("options, message", BAD_BUILDS, ids=[m for _, m in BAD_BUILDS])
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TwoCircuits(**({"vocabulary": VOCABULARY, "outputs": OUTPUTS} | options))


def test_bad_codes_and_names_are_refused():
    with pytest.raises(ValueError, match=r"code = 'AFOF'; expected one of 'FAFO'"):
        parse_code("AFOF")
    with pytest.raises(ValueError, match=r"'attn.rel_bias' belongs to no circuit. Known: W_Q, W_K, W_QK → QK; W_V, W_O, W_OV → OV"):
        circuit_of("attn.rel_bias")
    model = build("FAFO")
    model.register_parameter("W_U", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match="W_U"):
        model.parameter_groups(1.0, 1.0)


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_rates_must_be_positive(rates):
    with pytest.raises(ValueError, match=r"parameter_groups: eta_.. = .*expected a finite number > 0"):
        build("FAFO").parameter_groups(*rates)


def test_bad_data_are_refused():
    model = build("FAFO", ensemble=(2,))
    query, tokens, label = data(0)
    counts = counts_of(tokens)
    for given_ in ({}, {"tokens": tokens, "counts": counts}):
        with pytest.raises(ValueError, match="exactly one of tokens= and counts="):
            model(query, **given_)
    with pytest.raises(ValueError, match=r"query holds 11; expected ids from 0 to 10"):
        model(torch.full((BATCH,), 11), tokens=tokens)
    with pytest.raises(ValueError, match="tokens holds -1"):
        model(query, tokens=torch.full((BATCH, KEYS), -1))
    with pytest.raises(ValueError, match="expected whole numbers"):
        model(query, tokens=tokens.double())
    with pytest.raises(ValueError, match=r"query has shape \(3, 7\); expected \[batch\].*\(2, 'batch'\)"):
        model(query.expand(3, BATCH), tokens=tokens.expand(3, BATCH, KEYS))
    with pytest.raises(ValueError, match=r"tokens has shape \(3, 7\); expected \(7, 'any'\)"):
        model(query, tokens=tokens.mT)
    with pytest.raises(ValueError, match="at least one key"):
        model(query, tokens=tokens[:, :0])
    with pytest.raises(ValueError, match=r"counts has shape \(7, 10\)"):
        model(query, counts=counts[:, :-1])
    with pytest.raises(ValueError, match="counts = -1"):
        model(query, counts=counts - 1)
    with pytest.raises(ValueError, match="counts = nan"):
        model(query, counts=counts * math.nan)
    with pytest.raises(ValueError, match="counts of 7 of 7 sequences are all 0"):
        model(query, counts=counts * 0)
    with pytest.raises(ValueError, match="label holds 5"):
        model.loss(query, label * 0 + OUTPUTS, tokens=tokens)


def test_bad_patterns_are_refused():
    model = build("CACO")
    query, tokens, _ = data(0)
    pattern = model.pattern(query, tokens=tokens)
    with pytest.raises(ValueError, match=r"row \[0\] sums to 0.8400 \(7 of 7 rows are off\)"):
        model.logits(0.84 * pattern, tokens=tokens)
    with pytest.raises(ValueError, match="sums to nan"):
        model.logits(pattern * math.nan, tokens=tokens)
    with pytest.raises(ValueError, match=r"pattern has shape \(7, 3\); expected \('any', 11\)"):
        model.logits(pattern)


def test_bad_weights_are_refused():
    w_qk, w_ov = torch.eye(VOCABULARY), torch.zeros(VOCABULARY, OUTPUTS)
    with pytest.raises(ValueError, match="got W_QK; expected"):
        TwoCircuits.from_weights(W_QK=w_qk)
    with pytest.raises(ValueError, match=r"W_OV has shape \(5, 11\); expected \(11, 11\)"):
        TwoCircuits.from_weights(W_QK=w_qk, W_OV=w_ov.mT)
    with pytest.raises(ValueError, match="W_QK = nan at index"):
        TwoCircuits.from_weights(W_QK=w_qk * math.nan, W_OV=w_ov)
