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


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _exp_rows(z, tops, power):
    """exp(z[i, v] - tops[i]) in place, for exponents <= 0; NaN stays NaN. Vectorises, unlike calls of the C library.

    x = k ln 2 + r with |r| < 0.35: exp(r) by a polynomial to rounding error, then k is added to its exponent bits. Adding
    1.5 * 2**52 (2**23) leaves the rounded k in the low bits. Sums must not be reordered here, which is why the flags are
    written out: a function that leaves them open is compiled with those of its caller.
    """
    f = z.dtype.type
    if z.itemsize == 8:
        bits, k_bits = z.view(np.int64), power.view(np.int64)
        for i in range(z.shape[0]):
            for v in range(WIDTH):
                entry = z[i, v] - tops[i]
                x = f(-700.0) if entry < f(-700.0) else entry  # 1e-304, beside a sum that holds a 1
                shifted = x * f(1.4426950408889634) + f(6755399441055744.0)
                power[i, v] = shifted
                k = shifted - f(6755399441055744.0)
                r = (x - k * f(6.93147180369123816490e-01)) - k * f(1.90821492927058770002e-10)
                p = f(1.6059043836821613e-10) * r + f(2.08767569878681e-09)
                p = p * r + f(2.505210838544172e-08)
                p = p * r + f(2.755731922398589e-07)
                p = p * r + f(2.7557319223985893e-06)
                p = p * r + f(2.48015873015873e-05)
                p = p * r + f(1.984126984126984e-04)
                p = p * r + f(1.388888888888889e-03)
                p = p * r + f(8.333333333333333e-03)
                p = p * r + f(4.1666666666666664e-02)
                p = p * r + f(1.6666666666666666e-01)
                p = p * r + f(0.5)
                p = p * r + f(1.0)
                z[i, v] = p * r + f(1.0)
            for v in range(WIDTH):
                bits[i, v] += k_bits[i, v] << 52
    else:
        bits_32, k_bits_32 = z.view(np.int32), power.view(np.int32)
        for i in range(z.shape[0]):
            for v in range(WIDTH):
                entry = z[i, v] - tops[i]
                x = f(-87.0) if entry < f(-87.0) else entry  # 2e-38
                shifted = x * f(1.4426950408889634) + f(12582912.0)
                power[i, v] = shifted
                k = shifted - f(12582912.0)
                r = (x - k * f(0.693359375)) - k * f(-2.12194440054690583e-4)
                p = f(1.984126984126984e-04) * r + f(1.388888888888889e-03)
                p = p * r + f(8.333333333333333e-03)
                p = p * r + f(4.1666666666666664e-02)
                p = p * r + f(1.6666666666666666e-01)
                p = p * r + f(0.5)
                p = p * r + f(1.0)
                z[i, v] = p * r + f(1.0)
            for v in range(WIDTH):
                bits_32[i, v] += k_bits_32[i, v] << np.int32(23)


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
def _mix(common, distinct, starts, tokens, matrix, out, part):
    """Rows of a matrix [token, width] weighted by attention: out [sample, width].

    Common tokens are the first rows for everybody, a class's distinct tokens are neighbours: products of slices, no copies.
    """
    n = common.shape[1]
    np.dot(common, matrix[:n], out)
    for c in range(tokens.shape[0]):
        low, high, first = starts[c], starts[c + 1], tokens[c, n]
        if low < high:
            np.dot(distinct[low:high], matrix[first : first + distinct.shape[1]], part[low:high])
    for i in range(out.shape[0]):
        for v in range(out.shape[1]):
            out[i, v] += part[i, v]


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _to_rows(common, distinct, starts, tokens, to_out, gradient):
    """Gradient of the matrix of `_mix` [token, width], given that of its result."""
    n = common.shape[1]
    np.dot(common.T, to_out, gradient[:n])
    for c in range(tokens.shape[0]):
        low, high, first = starts[c], starts[c + 1], tokens[c, n]
        if low < high:
            np.dot(distinct[low:high].T, to_out[low:high], gradient[first : first + distinct.shape[1]])
        else:
            gradient[first : first + distinct.shape[1]] = 0.0


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _to_attention(starts, tokens, matrix, to_out, to_common, to_distinct):
    """Gradient of the attention of `_mix`, given that of its result."""
    n = to_common.shape[1]
    np.dot(to_out, matrix[:n].T, to_common)
    for c in range(tokens.shape[0]):
        low, high, first = starts[c], starts[c + 1], tokens[c, n]
        if low < high:
            np.dot(to_out[low:high], matrix[first : first + to_distinct.shape[1]].T, to_distinct[low:high])


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _cross_entropy(logits, starts, label, biased, bias, tops, power, bias_gradient):
    """Mean cross-entropy in nats of a batch sorted by class; logits [sample, WIDTH] become d loss / d logits.

    tops [sample] and power [sample, WIDTH] are scratch; bias and its gradient are touched only if `biased`.
    """
    samples = logits.shape[0]
    lanes = np.empty(LANES, logits.dtype)
    loss = 0.0
    for c in range(label.size):
        for i in range(starts[c], starts[c + 1]):
            z = logits[i]
            if biased:
                for v in range(WIDTH):
                    z[v] += bias[v]
            for v in range(VOCABULARY, WIDTH):
                z[v] = -np.inf  # the padding gets no probability
            for v in range(LANES):
                lanes[v] = z[v]
            for b in range(LANES, WIDTH, LANES):
                for v in range(LANES):
                    lanes[v] = z[b + v] if z[b + v] > lanes[v] else lanes[v]
            top = lanes[0]
            for v in range(1, LANES):
                top = lanes[v] if lanes[v] > top else top
            tops[i] = top
            loss += np.float64(top) - np.float64(z[label[c]])
    _exp_rows(logits, tops, power)
    for c in range(label.size):
        for i in range(starts[c], starts[c + 1]):
            z = logits[i]
            total = 0.0 * z[0]
            for v in range(WIDTH):
                total += z[v]
            loss += np.log(np.float64(total))
            share = 1.0 / (total * samples)
            for v in range(WIDTH):
                z[v] *= share
            for v in range(VOCABULARY, WIDTH):
                z[v] = 0.0
            z[label[c]] -= 1.0 / samples
    if biased:
        bias_gradient[:] = 0.0
        for i in range(samples):
            for v in range(WIDTH):
                bias_gradient[v] += logits[i, v]
    return loss / samples


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def _descend(weights, eta, gradient):
    """weights -= eta * gradient, in place."""
    for i in range(weights.shape[0]):
        for v in range(weights.shape[1]):
            weights[i, v] -= eta * gradient[i, v]


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def train_attention(
    counts, classes, tokens, query, label, attended, split_qk, split_ov, W_Q, W_K, W_V, W_O, eta_qk, eta_slope, eta_ov, first, block, losses
):
    """SGD on a stretch of batches for a one-head attention model of which only the query position is read.

    Args:
        counts: [step, sample, slot] of the context; classes: [step, sample].
        tokens: [class, slot]; the first half of the slots are tokens 0, 1, ... for every class, the second half neighbours.
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
    n_classes, n = tokens.shape[0], slots // 2
    common, distinct = np.empty((samples, n), kind), np.empty((samples, slots - n), kind)
    to_common, to_distinct = np.empty((samples, n), kind), np.empty((samples, slots - n), kind)
    place, starts = np.empty(samples, np.int64), np.empty(n_classes + 1, np.int64)
    logits, part, power = np.empty((samples, WIDTH), kind), np.empty((samples, WIDTH), kind), np.empty((samples, WIDTH), kind)
    hidden, to_hidden = np.empty((samples, W_V.shape[1]), kind), np.empty((samples, W_V.shape[1]), kind)
    hidden_part, turned = np.empty((samples, W_V.shape[1]), kind), np.empty((WIDTH, W_O.shape[0]), kind)
    gradient_O, gradient_V = np.empty(W_O.shape, kind), np.empty(W_V.shape, kind)
    tops, bias = np.empty(samples, kind), np.empty(0, kind)
    scores, to_scores = np.empty((n_classes, VOCABULARY), kind), np.zeros((n_classes, VOCABULARY), kind)
    weight, to_slots = np.empty((n_classes, slots), kind), np.empty((n_classes, slots), kind)
    gradient_Q, gradient_K = np.empty(W_Q.shape, kind), np.empty(W_K.shape, kind)
    scale = kind.type(1.0 / np.sqrt(VOCABULARY))
    for step in range(steps):
        if split_qk:
            np.dot(W_Q, W_K.T, scores)
        else:
            scores[:] = W_Q
        for c in range(n_classes):
            top = -np.inf
            for j in range(slots):
                weight[c, j] = scores[c, tokens[c, j]] * scale
                top = max(top, weight[c, j])
            for j in range(slots):
                weight[c, j] = np.exp(weight[c, j] - top)  # of one key, before normalisation
                to_slots[c, j] = 0.0
        _sort_by_class(classes[step], place, starts)
        for i in range(samples):
            c, own = classes[step, i], counts[step, i]
            near, far, w = common[place[i]], distinct[place[i]], weight[c]
            for j in range(n):
                near[j] = own[j] * w[j]
            for j in range(slots - n):
                far[j] = own[n + j] * w[n + j]
            near[query[c]] += attended * w[query[c]]
            total = 0.0 * scale
            for j in range(n):
                total += near[j]
            for j in range(slots - n):
                total += far[j]
            share = 1.0 / total
            for j in range(n):
                near[j] *= share
            for j in range(slots - n):
                far[j] *= share
        if split_ov:
            _mix(common, distinct, starts, tokens, W_V, hidden, hidden_part)
            np.dot(hidden, W_O, logits)
        else:
            _mix(common, distinct, starts, tokens, W_O, logits, part)
        loss = _cross_entropy(logits, starts, label, False, bias, tops, power, bias)
        if not np.isfinite(loss):
            return step
        losses[step // block] += loss / block
        # All gradients before any update: each needs the old value of the other factor.
        if split_ov:
            np.dot(hidden.T, logits, gradient_O)
            for v in range(WIDTH):
                for h in range(W_O.shape[0]):
                    turned[v, h] = W_O[h, v]
            np.dot(logits, turned, to_hidden)  # faster than a product with W_O.T by more than the copy costs
            _to_rows(common, distinct, starts, tokens, to_hidden, gradient_V)
            _to_attention(starts, tokens, W_V, to_hidden, to_common, to_distinct)
        else:
            _to_rows(common, distinct, starts, tokens, logits, gradient_O)
            _to_attention(starts, tokens, W_O, logits, to_common, to_distinct)
        for c in range(n_classes):
            s = to_slots[c]
            for i in range(starts[c], starts[c + 1]):
                near, far, to_near, to_far = common[i], distinct[i], to_common[i], to_distinct[i]
                mean = 0.0 * scale
                for j in range(n):
                    mean += near[j] * to_near[j]
                for j in range(slots - n):
                    mean += far[j] * to_far[j]
                for j in range(n):
                    s[j] += near[j] * (to_near[j] - mean)
                for j in range(slots - n):
                    s[n + j] += far[j] * (to_far[j] - mean)
            for j in range(slots):
                to_scores[c, tokens[c, j]] = s[j]
        eta = kind.type((eta_qk + eta_slope * (first + step)) / np.sqrt(VOCABULARY))
        if split_qk:
            np.dot(to_scores, W_K, gradient_Q)
            np.dot(to_scores.T, W_Q, gradient_K)
            _descend(W_Q, eta, gradient_Q)
            _descend(W_K, eta, gradient_K)
        else:
            _descend(W_Q, eta, to_scores)
        _descend(W_O, kind.type(eta_ov), gradient_O)
        if split_ov:
            _descend(W_V, kind.type(eta_ov), gradient_V)
    return -1


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def train_fixed(counts, classes, tokens, last, label, share, mean_field, split_ov, biased, W_V, W_O, bias, eta, block, losses):
    """SGD on a stretch of batches with attention held fixed: `share` evenly on distinct positions, the rest on common ones.

    Args:
        counts, classes, tokens, label: as in `train_attention`.
        last: [class], id of the last input token, a common one.
        share: attention on the distinct positions; a sequence without any (1e-12 of them) gives it to none.
        mean_field: [class, slot] attention used for every sample instead of its own; no rows = off.
        split_ov: whether the output is factorised; biased: whether `bias` [WIDTH] is trained.

    Returns:
        as `train_attention`.
    """
    kind = W_O.dtype
    steps, samples, slots = counts.shape
    n_classes, n = tokens.shape[0], slots // 2
    common, distinct = np.empty((samples, n), kind), np.empty((samples, slots - n), kind)
    place, starts = np.empty(samples, np.int64), np.empty(n_classes + 1, np.int64)
    logits, part, power = np.empty((samples, WIDTH), kind), np.empty((samples, WIDTH), kind), np.empty((samples, WIDTH), kind)
    tops = np.empty(samples, kind)
    circuit, gradient = np.empty((VOCABULARY, WIDTH), kind), np.empty((VOCABULARY, WIDTH), kind)
    gradient_O, gradient_V, bias_gradient = np.empty(W_O.shape, kind), np.empty(W_V.shape, kind), np.empty(WIDTH, kind)
    rate = kind.type(eta)
    for step in range(steps):
        _sort_by_class(classes[step], place, starts)
        for i in range(samples):
            c, own = classes[step, i], counts[step, i]
            near, far = common[place[i]], distinct[place[i]]
            if mean_field.shape[0] > 0:
                for j in range(n):
                    near[j] = mean_field[c, j]
                for j in range(slots - n):
                    far[j] = mean_field[c, n + j]
                continue
            n_common, n_distinct = np.int64(1), np.int64(0)
            for j in range(n):
                n_common += own[j]
            for j in range(slots - n):
                n_distinct += own[n + j]
            on_common, on_distinct = kind.type((1.0 - share) / n_common), kind.type(share / max(n_distinct, 1))
            for j in range(n):
                near[j] = own[j] * on_common
            near[last[c]] += on_common
            for j in range(slots - n):
                far[j] = own[n + j] * on_distinct
        # A batch has more samples than there are tokens, so multiplying the factors first is less work than carrying it through both.
        if split_ov:
            np.dot(W_V, W_O, circuit)
            _mix(common, distinct, starts, tokens, circuit, logits, part)
        else:
            _mix(common, distinct, starts, tokens, W_O, logits, part)
        loss = _cross_entropy(logits, starts, label, biased, bias, tops, power, bias_gradient)
        if not np.isfinite(loss):
            return step
        losses[step // block] += loss / block
        _to_rows(common, distinct, starts, tokens, logits, gradient)
        if split_ov:
            np.dot(W_V.T, gradient, gradient_O)
            np.dot(gradient, W_O.T, gradient_V)
            _descend(W_O, rate, gradient_O)
            _descend(W_V, rate, gradient_V)
        else:
            _descend(W_O, rate, gradient)
        if biased:
            for v in range(WIDTH):
                bias[v] -= rate * bias_gradient[v]
    return -1
