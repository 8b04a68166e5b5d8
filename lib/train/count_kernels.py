"""Compiled SGD steps on token counts. All compiled functions of `lib.train` live here, since numba's cache watches one file.

Rows are tokens (row-vector convention), so all matrices are transposes of `torch.nn.Linear.weight`. Output rows are padded from
50 to WIDTH with zeros, which stay zero: whole vector registers, no remainder loop.

The batch gradient is summed into a zeroed buffer and applied once. Adding each sample's small contribution straight to a weight
is the same step on paper, but in float32 it loses increments below half a unit in the last place (late losses up to 48 % too high).
"""

import numpy as np
from numba import njit

WIDTH, LANES = 56, 8
VOCABULARY = 50
# Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


@njit(cache=True, nogil=True, error_model="numpy", fastmath=False)
def _exp_all(x, power):
    """exp of every entry of x <= 0, in place; NaN stays NaN. Vectorises, unlike calls of the C library.

    x = k ln 2 + r with |r| < 0.35: 2**k by its exponent bits, exp(r) by its Taylor series to r**13 (rounding error only).
    Adding 1.5 * 2**52 leaves the rounded k in the low bits. Sums must not be reordered here, and fastmath=False must be written
    out: a function that leaves it open is compiled with the flags of its caller.
    """
    bits = power.view(np.int64)
    for i in range(x.size):
        entry = np.float64(x[i])
        v = -700.0 if entry < -700.0 else entry  # 1e-304: the sum over tokens holds a 1
        shifted = v * 1.4426950408889634 + 6755399441055744.0
        power[i] = shifted
        k = shifted - 6755399441055744.0
        r = (v - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
        p = 1.6059043836821613e-10
        p = p * r + 2.08767569878681e-09
        p = p * r + 2.505210838544172e-08
        p = p * r + 2.755731922398589e-07
        p = p * r + 2.7557319223985893e-06
        p = p * r + 2.48015873015873e-05
        p = p * r + 1.984126984126984e-04
        p = p * r + 1.388888888888889e-03
        p = p * r + 8.333333333333333e-03
        p = p * r + 4.1666666666666664e-02
        p = p * r + 1.6666666666666666e-01
        p = p * r + 0.5
        p = p * r + 1.0
        x[i] = p * r + 1.0
    for i in range(x.size):
        bits[i] = (bits[i] + 1023) << 52
    for i in range(x.size):
        x[i] *= power[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _sort_by_class(classes, place, starts):
    """Row of each sample when the batch is sorted by class, and where each class starts: small dense products per class."""
    starts[:] = 0
    for c in classes:
        starts[c + 1] += 1
    for c in range(1, starts.size):
        starts[c] += starts[c - 1]
    for i in range(classes.size - 1, -1, -1):
        starts[classes[i] + 1] -= 1
        place[i] = starts[classes[i] + 1]
    for c in range(starts.size - 1):
        starts[c] = starts[c + 1]
    starts[-1] = classes.size


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _output_pass(attention, starts, tokens, label, weight, bias, logits, power, rows, gradient, bias_gradient):
    """Loss of a batch given its attention per slot, and the gradients of all that stands after the pattern.

    Args:
        attention: [sample, slot], attention summed over a slot's positions, sorted by class; starts: [class + 1].
        tokens: [class, slot], token ids; label: [class], token ids.
        weight: [token, WIDTH], output circuit; bias: [WIDTH], minus infinity in the padding, which so gets no probability.
        logits: [sample, WIDTH], overwritten by d loss / d logits; power: scratch of the same shape, float64.
        rows: [class, slot, WIDTH], overwritten by the rows of `weight` that a class uses.
        gradient: [token, WIDTH] and bias_gradient: [WIDTH], overwritten.

    Returns:
        mean cross-entropy in nats.
    """
    samples, slots = attention.shape
    used, lanes = np.empty((slots, WIDTH), weight.dtype), np.empty(LANES, weight.dtype)
    gradient[:] = 0.0
    bias_gradient[:] = 0.0
    loss = 0.0
    for c in range(tokens.shape[0]):
        for j in range(slots):
            for v in range(WIDTH):
                rows[c, j, v] = weight[tokens[c, j], v]
        if starts[c] == starts[c + 1]:
            continue
        a, z = attention[starts[c] : starts[c + 1]], logits[starts[c] : starts[c + 1]]
        np.dot(a, rows[c], z)
        for i in range(z.shape[0]):
            for v in range(WIDTH):
                z[i, v] += bias[v]
            for v in range(LANES):
                lanes[v] = z[i, v]
            for b in range(LANES, WIDTH, LANES):
                for v in range(LANES):
                    lanes[v] = z[i, b + v] if z[i, b + v] > lanes[v] else lanes[v]
            top = lanes[0]
            for v in range(1, LANES):
                top = lanes[v] if lanes[v] > top else top
            loss += np.float64(top) - np.float64(z[i, label[c]])
            for v in range(WIDTH):
                z[i, v] -= top
        _exp_all(z.reshape(-1), power[starts[c] : starts[c + 1]].reshape(-1))
        for i in range(z.shape[0]):
            total = 0.0 * z[i, 0]
            for v in range(WIDTH):
                total += z[i, v]
            loss += np.log(np.float64(total))
            share = 1.0 / (total * samples)
            for v in range(WIDTH):
                z[i, v] *= share
            for v in range(VOCABULARY, WIDTH):
                z[i, v] = 0.0
            z[i, label[c]] -= 1.0 / samples
            for v in range(WIDTH):
                bias_gradient[v] += z[i, v]
        np.dot(a.T, z, used)
        for j in range(slots):
            for v in range(WIDTH):
                gradient[tokens[c, j], v] += used[j, v]
    return loss / samples


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _output_update(factorised, eta, W_V, W_O, gradient, gradient_V, gradient_O):
    """Apply the gradient of the output circuit: to W_O alone, or by the chain rule to both factors of W_V W_O, at once."""
    if factorised:
        np.dot(W_V.T, gradient, gradient_O)
        np.dot(gradient, W_O.T, gradient_V)
        for t in range(W_V.shape[0]):
            for h in range(W_V.shape[1]):
                W_V[t, h] -= eta * gradient_V[t, h]
        for h in range(W_O.shape[0]):
            for v in range(WIDTH):
                W_O[h, v] -= eta * gradient_O[h, v]
    else:
        for t in range(W_O.shape[0]):
            for v in range(WIDTH):
                W_O[t, v] -= eta * gradient[t, v]


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def train_attention(
    counts, classes, tokens, query, label, attended, split_qk, split_ov, W_Q, W_K, W_V, W_O, eta_qk, eta_slope, eta_ov, first, block, losses
):
    """SGD on a stretch of batches for a one-head attention model of which only the query position is read.

    Args:
        counts: [step, sample, slot] of the context; classes: [step, sample]; tokens: [class, slot].
        query, label: [class], ids of common tokens, which are their slots too.
        attended: how often the query token is among its own keys (0 or 1).
        split_qk, split_ov: whether attention and output are factorised into two matrices.
        W_Q: [class, d] rows of the query tokens, or with collapsed attention the circuit's rows [class, token]; W_K: [token, d].
        W_V: [token, hidden] and W_O: [hidden, WIDTH], or with a collapsed output the circuit in W_O [token, WIDTH].
        eta_qk, eta_slope: the QK rate of step t is eta_qk + eta_slope * t; eta_ov: the output rate.
        first: t of the first batch; block: steps over which losses are summed.
        losses: [(steps)/block], the mean loss of each block is added up here.

    Returns:
        index within the stretch of the first step whose loss is not finite (that step is not applied), or -1.
    """
    kind = W_O.dtype
    steps, samples, slots = counts.shape
    n_classes = tokens.shape[0]
    attention, wanted = np.empty((samples, slots), kind), np.empty((samples, slots), kind)
    place, starts = np.empty(samples, np.int64), np.empty(n_classes + 1, np.int64)
    logits, power = np.empty((samples, WIDTH), kind), np.empty((samples, WIDTH), np.float64)
    rows = np.empty((n_classes, slots, WIDTH), kind)
    gradient, gradient_O, gradient_V = np.empty((VOCABULARY, WIDTH), kind), np.empty(W_O.shape, kind), np.empty(W_V.shape, kind)
    circuit, bias, bias_gradient = np.empty((VOCABULARY, WIDTH), kind), np.zeros(WIDTH, kind), np.empty(WIDTH, kind)
    bias[VOCABULARY:] = -np.inf
    scores, score_gradient = np.empty((n_classes, slots), kind), np.empty((n_classes, slots), kind)
    gradient_Q, gradient_K = np.empty(W_Q.shape, kind), np.empty(W_K.shape, kind)
    scale = W_Q.dtype.type(1.0 / np.sqrt(VOCABULARY))
    for step in range(steps):
        for c in range(n_classes):
            top = -np.inf
            for j in range(slots):
                if split_qk:
                    dot = 0.0 * scale
                    for h in range(W_Q.shape[1]):
                        dot += W_Q[c, h] * W_K[tokens[c, j], h]
                else:
                    dot = W_Q[c, tokens[c, j]]
                scores[c, j] = dot * scale
                top = max(top, scores[c, j])
            for j in range(slots):
                scores[c, j] = np.exp(scores[c, j] - top)  # from here on: the weight of one key
                score_gradient[c, j] = 0.0
        _sort_by_class(classes[step], place, starts)
        for i in range(samples):
            c, a = classes[step, i], attention[place[i]]
            total = attended * scores[c, query[c]]
            for j in range(slots):
                total += counts[step, i, j] * scores[c, j]
            share = 1.0 / total
            for j in range(slots):
                a[j] = counts[step, i, j] * scores[c, j] * share
            a[query[c]] += attended * scores[c, query[c]] * share
        if split_ov:
            np.dot(W_V, W_O, circuit)
            weight = circuit
        else:
            weight = W_O
        loss = _output_pass(attention, starts, tokens, label, weight, bias, logits, power, rows, gradient, bias_gradient)
        if not np.isfinite(loss):
            return step
        losses[step // block] += loss / block
        for c in range(n_classes):
            if starts[c] == starts[c + 1]:
                continue
            a, w = attention[starts[c] : starts[c + 1]], wanted[starts[c] : starts[c + 1]]
            np.dot(logits[starts[c] : starts[c + 1]], rows[c].T, w)  # d loss / d attention
            for i in range(a.shape[0]):
                mean = 0.0 * scale
                for j in range(slots):
                    mean += a[i, j] * w[i, j]
                for j in range(slots):
                    score_gradient[c, j] += a[i, j] * (w[i, j] - mean)
        eta = W_Q.dtype.type((eta_qk + eta_slope * (first + step)) / np.sqrt(VOCABULARY))
        if split_qk:
            gradient_Q[:] = 0.0
            gradient_K[:] = 0.0
            for c in range(n_classes):
                for j in range(slots):
                    t, s = tokens[c, j], score_gradient[c, j]
                    for h in range(W_Q.shape[1]):
                        gradient_Q[c, h] += s * W_K[t, h]
                        gradient_K[t, h] += s * W_Q[c, h]
            W_Q -= eta * gradient_Q
            W_K -= eta * gradient_K
        else:
            for c in range(n_classes):
                for j in range(slots):
                    W_Q[c, tokens[c, j]] -= eta * score_gradient[c, j]
        _output_update(split_ov, kind.type(eta_ov), W_V, W_O, gradient, gradient_V, gradient_O)
    return -1


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def train_fixed(counts, classes, tokens, last, label, share, mean_field, split_ov, biased, W_V, W_O, bias, eta, block, losses):
    """SGD on a stretch of batches with attention held fixed: `share` evenly on distinct positions, the rest on common ones.

    Args:
        counts, classes, tokens, label: as in `train_attention`; slots from 10 on are distinct.
        last: [class], id of the last input token, a common one.
        share: attention on the distinct positions; a sequence without any (1e-12 of them) gives it to none.
        mean_field: [class, slot] attention used for every sample instead of its own; no rows = off.
        split_ov: whether the output is factorised; biased: whether `bias` [WIDTH] is trained.

    Returns:
        as `train_attention`.
    """
    kind = W_O.dtype
    steps, samples, slots = counts.shape
    n_classes = tokens.shape[0]
    attention = np.empty((samples, slots), kind)
    place, starts = np.empty(samples, np.int64), np.empty(n_classes + 1, np.int64)
    logits, power = np.empty((samples, WIDTH), kind), np.empty((samples, WIDTH), np.float64)
    rows = np.empty((n_classes, slots, WIDTH), kind)
    gradient, gradient_O, gradient_V = np.empty((VOCABULARY, WIDTH), kind), np.empty(W_O.shape, kind), np.empty(W_V.shape, kind)
    circuit, bias_gradient = np.empty((VOCABULARY, WIDTH), kind), np.empty(WIDTH, kind)
    common = slots // 2
    for step in range(steps):
        _sort_by_class(classes[step], place, starts)
        for i in range(samples):
            c, a = classes[step, i], attention[place[i]]
            if mean_field.shape[0] > 0:
                for j in range(slots):
                    a[j] = mean_field[c, j]
                continue
            n_common, n_distinct = 1, 0
            for j in range(common):
                n_common += counts[step, i, j]
            for j in range(common, slots):
                n_distinct += counts[step, i, j]
            on_common, on_distinct = (1.0 - share) / n_common, share / max(n_distinct, 1)
            for j in range(common):
                a[j] = counts[step, i, j] * on_common
            a[last[c]] += on_common
            for j in range(common, slots):
                a[j] = counts[step, i, j] * on_distinct
        if split_ov:
            np.dot(W_V, W_O, circuit)
            weight = circuit
        else:
            weight = W_O
        loss = _output_pass(attention, starts, tokens, label, weight, bias, logits, power, rows, gradient, bias_gradient)
        if not np.isfinite(loss):
            return step
        losses[step // block] += loss / block
        _output_update(split_ov, kind.type(eta), W_V, W_O, gradient, gradient_V, gradient_O)
        if biased:
            for v in range(WIDTH):
                bias[v] -= kind.type(eta) * bias_gradient[v]
    return -1
