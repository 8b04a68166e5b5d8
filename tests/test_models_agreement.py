"""The batched agreement model against the plain layer, written out in full and as torch.nn.MultiheadAttention."""

import pytest
import torch

from lib.models import agreement

SHAPE = agreement.Shape(vocabulary=23, d_model=14, heads=2, d_head=11, positions=19, outputs=3, init_scale=0.5)


def random_models(models=3, seed=0, shape=SHAPE):
    """Parameters with every bias off zero, so that a forgotten one shows."""
    stacks = agreement.initial(shape, list(range(models)))
    generator = torch.Generator().manual_seed(seed)
    return {name: stack + 0.3 * torch.randn(stack.shape, generator=generator, dtype=stack.dtype) for name, stack in stacks.items()}


def random_batch(models=3, batch=5, longest=13, seed=1):
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, longest + 1, (models, batch), generator=generator)
    length[0, 0] = longest
    tokens = torch.randint(1, SHAPE.vocabulary, (models, batch, longest), generator=generator)
    return tokens.masked_fill(torch.arange(longest) >= length[..., None], 0), length


def plain(p, tokens, length):
    """One model, one sentence, every query, nothing folded: causal and padding masks, then the last real token."""
    T = len(tokens)
    x = p["E"][tokens] + p["P"][:T]
    blocked = ~torch.ones(T, T).tril().bool() | (torch.arange(T) >= length)
    total, patterns = p["b_O"].clone().expand(T, -1), []
    for h in range(len(p["W_Q"])):
        q, k, v = (x @ p[f"W_{c}"][h] + p[f"b_{c}"][h] for c in "QKV")
        pattern = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(blocked, -torch.inf).softmax(-1)
        total = total + pattern @ v @ p["W_O"][h]
        patterns.append(pattern)
    return (total @ p["W_U"] + p["b_U"])[length - 1], torch.stack(patterns)[:, length - 1]


def one(parameters, m):
    return {name: stack[m] for name, stack in parameters.items()}


def test_logits_and_pattern_equal_the_plain_layer_with_all_queries():
    parameters, (tokens, length) = random_models(), random_batch()
    logits, pattern = agreement.forward(parameters, tokens, length)
    for m in range(3):
        for i in range(5):
            want, row = plain(one(parameters, m), tokens[m, i], length[m, i])
            torch.testing.assert_close(logits[m, i], want, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(pattern[m, i], row, rtol=1e-11, atol=1e-12)


def test_gradients_equal_autograd_through_the_plain_layer():
    parameters, (tokens, length) = random_models(), random_batch()
    label = torch.randint(0, 2, length.shape, generator=torch.Generator().manual_seed(3))

    def gradients(loss_of):
        leaves = {name: stack.clone().requires_grad_() for name, stack in parameters.items()}
        grads = torch.autograd.grad(loss_of(leaves), list(leaves.values()), allow_unused=True)
        return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, grads, strict=True)}

    def ours(p):
        return torch.nn.functional.cross_entropy(agreement.forward(p, tokens, length)[0].flatten(0, 1), label.flatten())

    def theirs(p):
        logits = [plain(one(p, m), tokens[m, i], length[m, i])[0] for m in range(3) for i in range(5)]
        return torch.nn.functional.cross_entropy(torch.stack(logits), label.flatten())

    mine, reference = gradients(ours), gradients(theirs)
    for name in parameters:
        torch.testing.assert_close(mine[name], reference[name], rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
    assert reference["b_K"].abs().max() < 1e-12  # the key bias has no effect, so leaving it out is exact


def test_ours_equals_torch_multihead_attention():
    shape = agreement.Shape(vocabulary=23, d_model=14, heads=2, d_head=7, positions=19, init_scale=0.5)  # torch has d_head = d/heads
    parameters, (tokens, length) = random_models(shape=shape), random_batch()
    logits, pattern = agreement.forward(parameters, tokens, length)
    for m in range(3):
        p = one(parameters, m)
        layer = torch.nn.MultiheadAttention(14, 2, batch_first=True, dtype=torch.float64)
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.cat([torch.cat(list(p[f"W_{c}"]), 1).T for c in "QKV"]))
            layer.in_proj_bias.copy_(torch.cat([p[f"b_{c}"].flatten() for c in "QKV"]))
            layer.out_proj.weight.copy_(p["W_O"].flatten(0, 1).T)
            layer.out_proj.bias.copy_(p["b_O"])
        T = tokens.shape[-1]
        x = p["E"][tokens[m]] + p["P"][:T]
        padding = torch.arange(T) >= length[m][:, None]
        out, weights = layer(x, x, x, key_padding_mask=padding, attn_mask=~torch.ones(T, T).tril().bool(), average_attn_weights=False)
        rows = torch.arange(len(x))
        torch.testing.assert_close(logits[m], out[rows, length[m] - 1] @ p["W_U"] + p["b_U"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(pattern[m], weights[rows, :, length[m] - 1], rtol=1e-10, atol=1e-12)


def test_result_does_not_depend_on_padding():
    parameters, (tokens, length) = random_models(), random_batch()
    longer = torch.nn.functional.pad(tokens, (0, 4))
    for got, want in zip(agreement.forward(parameters, longer, length), agreement.forward(parameters, tokens, length), strict=True):
        torch.testing.assert_close(got[..., : want.shape[-1]], want, rtol=1e-12, atol=1e-12)


def test_pattern_rows_sum_to_one_with_padding():
    parameters, (tokens, length) = random_models(), random_batch()
    _, pattern = agreement.forward(parameters, tokens, length)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1], dtype=torch.float64))
    padding = torch.arange(tokens.shape[-1]) >= length[..., None]
    assert pattern.masked_select(padding[:, :, None].expand_as(pattern)).abs().max() == 0


def test_models_of_one_seed_start_alike_and_of_two_seeds_differ():
    stacks = agreement.initial(SHAPE, [4, 9, 4])
    for name, stack in stacks.items():
        assert torch.equal(stack[0], stack[2])
        assert name.startswith("b_") == torch.equal(stack[0], stack[1])
    assert stacks["E"].std().item() == pytest.approx(SHAPE.init_scale, rel=0.1)


def test_sentence_longer_than_the_positions_is_refused():
    tokens = torch.ones(3, 2, 20, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"sentences of 20 tokens; expected at most the 19"):
        agreement.embed(random_models(), tokens)


def test_tokens_for_another_number_of_models_are_refused():
    with pytest.raises(ValueError, match=r"tokens for 2 models, parameters of 3"):
        agreement.embed(random_models(), torch.ones(2, 2, 5, dtype=torch.int64))


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match=r"heads = 0"):
        agreement.initial(agreement.Shape(vocabulary=5, heads=0), [0])
