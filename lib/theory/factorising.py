"""What gradient descent on the two factors of a matrix does to their product: an exact rescaling of the same gradient.

Everything is said for a product in neutral orientation, W = left @ right, so that it serves both circuits of both papers:

| circuit | product W | left | right | paper 1 |
|---|---|---|---|---|
| output | `ov_circuit` | W_V | W_O | W_OV = W_O W_V is our W transposed |
| attention | `qk_circuit` | W_Q | W_K.T | W_QK = W_Q W_K^T |

With G = dL/dW at the product, P = left leftᵀ and R = rightᵀ right (the two *preconditioners*):

    I1  W' = -eta (P G + G R)                                       flow on the factors, no assumption
    I2  W+ - W = -eta (P G + G R) + eta² G Wᵀ G                       one step of gradient descent, exact
    I3  P' = -eta (G Wᵀ + W Gᵀ),  R' = -eta (Wᵀ G + Gᵀ W)            so (W, P, R) is a closed system
    I4  Delta = leftᵀ left - right rightᵀ is conserved by the flow;  one step of descent adds order eta² (`imbalance_step`)
    I5  Delta = 0:  P = (W Wᵀ)^(1/2),  R = (Wᵀ W)^(1/2)             then W alone is closed
    I6  factors aligned with G:  P G + G R = (a² + c²) G            then the schedule is one number

All functions take leading batch axes; matrices are [..., row, column], hidden is the inner size. Rates are per unit of time.
Source: derived in chapter p1_factorising.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import DOP853, simpson, solve_ivp
from scipy.special import logsumexp, softmax

from lib import checks

#: Relative tolerance of the integrator: its error over the times used here stays below 1e-11, far below every effect looked for.
RTOL = 1e-13

Gradient = Callable[[np.ndarray], np.ndarray]


def _transposed(matrix: np.ndarray) -> np.ndarray:
    return np.swapaxes(matrix, -1, -2)


def _factors(where: str, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    left, right = np.asarray(left, dtype=float), np.asarray(right, dtype=float)
    if left.ndim < 2 or right.ndim < 2 or left.shape[-1] != right.shape[-2]:
        raise ValueError(
            f"{where}: left has shape {left.shape}, right {right.shape}; expected [..., row, hidden] and [..., hidden, column]."
        )
    checks.finite(where, left=left, right=right)
    return left, right


def _matched(where: str, left: np.ndarray, right: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    gradient = np.asarray(gradient, dtype=float)
    if gradient.ndim < 2 or gradient.shape[-2:] != (left.shape[-2], right.shape[-1]):
        raise ValueError(
            f"{where}: gradient has shape {gradient.shape}; expected [..., {left.shape[-2]}, {right.shape[-1]}], as left @ right."
        )
    checks.finite(where, gradient=gradient)
    return gradient


def preconditioners(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two matrices that stand beside the gradient: P = left leftᵀ and R = rightᵀ right.

    Args:
        left: [..., row, hidden].
        right: [..., hidden, column].

    Returns:
        P [..., row, row] and R [..., column, column], symmetric, no negative eigenvalue.

    Raises:
        ValueError: shapes that don't multiply, NaN.

    Source: derived in chapter p1_factorising (I1).
    """
    left, right = _factors("preconditioners", left, right)
    return left @ _transposed(left), _transposed(right) @ right


def rescaled(p: np.ndarray, gradient: np.ndarray, r: np.ndarray) -> np.ndarray:
    """P G + G R, the field along which a product of two factors moves; [..., row, column]. Source: chapter p1_factorising (I1)."""
    return p @ gradient + gradient @ r


def angle(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Angle between two matrices as vectors, in degrees.

    Args:
        first, second: [..., row, column].

    Returns:
        [...], from 0 (same direction) to 180.

    Raises:
        ValueError: different shapes, NaN, or a matrix of zeros, which has no direction.

    Source: standard; used in chapter p1_factorising.
    """
    first, second = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    checks.shape("angle", "second", second, first.shape)
    checks.finite("angle", first=first, second=second)
    lengths = np.linalg.norm(first, axis=(-2, -1)), np.linalg.norm(second, axis=(-2, -1))
    checks.positive("angle", length_of_first=lengths[0], length_of_second=lengths[1])
    u, v = (x / length[..., None, None] for x, length in zip((first, second), lengths, strict=True))
    # half-angle form: the arc cosine would lose half the digits near 0
    return np.degrees(2 * np.arctan2(np.linalg.norm(u - v, axis=(-2, -1)), np.linalg.norm(u + v, axis=(-2, -1))))


def relative_distance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Frobenius norm of the difference over that of the second.

    Args:
        first, second: [..., row, column].

    Returns:
        [...], dimensionless.

    Raises:
        ValueError: different shapes, NaN, or a second matrix of zeros.

    Source: standard; used in chapter p1_factorising.
    """
    first, second = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    checks.shape("relative_distance", "second", second, first.shape)
    checks.finite("relative_distance", first=first, second=second)
    length = np.linalg.norm(second, axis=(-2, -1))
    checks.positive("relative_distance", length_of_second=length)
    return np.linalg.norm(first - second, axis=(-2, -1)) / length


def effective_rate(left: np.ndarray, right: np.ndarray, gradient: np.ndarray, eta: float = 1.0) -> np.ndarray:
    """How fast the product moves per unit of gradient, eta |P G + G R| / |G| in the Frobenius norm.

    For one matrix trained directly this is eta. For aligned factors (I6) it is eta (a² + c²).

    Args:
        left, right, gradient: as in `factor_gradients`.
        eta: rate of the factors, > 0.

    Returns:
        [...], per unit of time.

    Raises:
        ValueError: as `product_velocity`, or a gradient of zeros.

    Source: derived in chapter p1_factorising (I1).
    """
    velocity = product_velocity(left, right, gradient, eta)
    length = np.linalg.norm(np.asarray(gradient, dtype=float), axis=(-2, -1))
    checks.positive("effective_rate", length_of_gradient=length)
    return np.linalg.norm(velocity, axis=(-2, -1)) / length


def factor_gradients(left: np.ndarray, right: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of the loss in the factors, from the gradient G in the product: G rightᵀ and leftᵀ G.

    Args:
        left: [..., row, hidden].
        right: [..., hidden, column].
        gradient: G = dL/dW at W = left @ right, [..., row, column].

    Returns:
        dL/dleft [..., row, hidden] and dL/dright [..., hidden, column].

    Raises:
        ValueError: shapes that don't fit, NaN.

    Source: chain rule, derived in chapter p1_factorising.
    """
    left, right = _factors("factor_gradients", left, right)
    gradient = _matched("factor_gradients", left, right, gradient)
    return gradient @ _transposed(right), _transposed(left) @ gradient


def gradient_step(left: np.ndarray, right: np.ndarray, gradient: np.ndarray, eta: float) -> tuple[np.ndarray, np.ndarray]:
    """The factors after one step of gradient descent.

    Args:
        left, right, gradient: as in `factor_gradients`.
        eta: learning rate, > 0.

    Returns:
        new left and right.

    Raises:
        ValueError: eta <= 0, shapes that don't fit, NaN.

    Source: definition of gradient descent.
    """
    checks.positive("gradient_step", eta=eta)
    d_left, d_right = factor_gradients(left, right, gradient)
    return np.asarray(left) - eta * d_left, np.asarray(right) - eta * d_right


def product_velocity(left: np.ndarray, right: np.ndarray, gradient: np.ndarray, eta: float = 1.0) -> np.ndarray:
    """I1: velocity of the product when its factors follow gradient flow, W' = -eta (P G + G R).

    Args:
        left, right, gradient: as in `factor_gradients`.
        eta: learning rate, > 0.

    Returns:
        [..., row, column], per unit of time.

    Raises:
        ValueError: eta <= 0, shapes that don't fit, NaN.

    Source: derived in chapter p1_factorising (I1).
    """
    checks.positive("product_velocity", eta=eta)
    left, right = _factors("product_velocity", left, right)
    gradient = _matched("product_velocity", left, right, gradient)
    p, r = preconditioners(left, right)
    return -eta * rescaled(p, gradient, r)


def product_step(left: np.ndarray, right: np.ndarray, gradient: np.ndarray, eta: float) -> np.ndarray:
    """I2: exact change of the product in one step of gradient descent, -eta (P G + G R) + eta² G Wᵀ G.

    The last term is where a step leaves the flow: both factors have moved, and their changes multiply.

    Args:
        left, right, gradient, eta: as in `product_velocity`.

    Returns:
        W after the step minus W before, [..., row, column].

    Raises:
        ValueError: eta <= 0, shapes that don't fit, NaN.

    Source: derived in chapter p1_factorising (I2).
    """
    left, right = _factors("product_step", left, right)
    gradient = _matched("product_step", left, right, gradient)
    velocity = product_velocity(left, right, gradient, eta)
    return velocity + eta**2 * gradient @ _transposed(left @ right) @ gradient


def closed_velocity(
    product: np.ndarray, p: np.ndarray, r: np.ndarray, gradient: np.ndarray, eta: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """I3: velocities of the product and of both preconditioners, in which the factors no longer occur.

    Args:
        product: W [..., row, column].
        p: P [..., row, row].
        r: R [..., column, column].
        gradient: dL/dW at W, [..., row, column].
        eta: learning rate, > 0.

    Returns:
        W', P', R', per unit of time.

    Raises:
        ValueError: eta <= 0, shapes that don't fit, NaN.

    Source: derived in chapter p1_factorising (I3).
    """
    checks.positive("closed_velocity", eta=eta)
    product, p, r, gradient = (np.asarray(x, dtype=float) for x in (product, p, r, gradient))
    rows, columns = product.shape[-2:]
    for name, matrix, size in (("p", p, (rows, rows)), ("r", r, (columns, columns)), ("gradient", gradient, (rows, columns))):
        checks.shape("closed_velocity", name, matrix, (*product.shape[:-2], *size))
    checks.finite("closed_velocity", product=product, p=p, r=r, gradient=gradient)
    across, down = gradient @ _transposed(product), _transposed(product) @ gradient
    return -eta * rescaled(p, gradient, r), -eta * (across + _transposed(across)), -eta * (down + _transposed(down))


def imbalance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """I4: Delta = leftᵀ left - right rightᵀ, which gradient flow on the factors conserves; 0 means balanced.

    Args:
        left: [..., row, hidden].
        right: [..., hidden, column].

    Returns:
        [..., hidden, hidden], symmetric.

    Raises:
        ValueError: shapes that don't multiply, NaN.

    Source: derived in chapter p1_factorising (I4).
    """
    left, right = _factors("imbalance", left, right)
    return _transposed(left) @ left - right @ _transposed(right)


def imbalance_step(left: np.ndarray, right: np.ndarray, gradient: np.ndarray, eta: float) -> np.ndarray:
    """Exact change of Delta in one step of gradient descent: eta² (right Gᵀ G rightᵀ - leftᵀ G Gᵀ left).

    The terms of first order in eta cancel, which is why the flow conserves Delta.

    Args:
        left, right, gradient, eta: as in `product_velocity`.

    Returns:
        [..., hidden, hidden].

    Raises:
        ValueError: eta <= 0, shapes that don't fit, NaN.

    Source: derived in chapter p1_factorising (I4).
    """
    checks.positive("imbalance_step", eta=eta)
    d_left, d_right = factor_gradients(left, right, gradient)
    return eta**2 * (_transposed(d_left) @ d_left - d_right @ _transposed(d_right))


def balanced_preconditioners(product: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """I5: what the preconditioners are when Delta = 0, P = (W Wᵀ)^(1/2) and R = (Wᵀ W)^(1/2).

    Args:
        product: W [..., row, column].

    Returns:
        P [..., row, row] and R [..., column, column].

    Raises:
        ValueError: not a matrix, NaN.

    Source: derived in chapter p1_factorising (I5).
    """
    product = _matrix("balanced_preconditioners", product)
    u, s, vt = np.linalg.svd(product, full_matrices=False)
    return (u * s[..., None, :]) @ _transposed(u), _transposed(vt) @ (s[..., :, None] * vt)


def _matrix(where: str, product: np.ndarray) -> np.ndarray:
    product = np.asarray(product, dtype=float)
    if product.ndim < 2 or 0 in product.shape:
        raise ValueError(f"{where}: product has shape {product.shape}; expected [..., row, column], none of them 0.")
    checks.finite(where, product=product)
    return product


def balanced_factors(product: np.ndarray, hidden: int, seed: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Factors of a given product with Delta = 0: the singular values are shared out evenly.

    Args:
        product: W [row, column].
        hidden: inner size, at least min(row, column).
        seed: of a random rotation of the hidden basis; None = none. No loss sees it.

    Returns:
        left [row, hidden], right [hidden, column].

    Raises:
        ValueError: hidden too small for a general W, NaN.

    Source: derived in chapter p1_factorising (I5).
    """
    product = _matrix("balanced_factors", product)
    checks.shape("balanced_factors", "product", product, (None, None))
    checks.integer_at_least("balanced_factors", min(product.shape), hidden=hidden)
    u, s, vt = np.linalg.svd(product, full_matrices=False)
    basis = np.eye(hidden) if seed is None else _rotation(hidden, seed)
    basis = basis[: len(s)]  # [singular value, hidden]
    return (u * np.sqrt(s)) @ basis, basis.T @ (np.sqrt(s)[:, None] * vt)


def _rotation(size: int, seed: int) -> np.ndarray:
    checks.integer_at_least("rotation", 0, seed=seed)
    q, upper = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    return q * np.sign(np.diag(upper))


def aligned_factors(a: float, c: float, rows: np.ndarray, columns: np.ndarray, hidden: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """I6: factors whose preconditioners act on the span of a gradient as plain numbers, P G = a² G and G R = c² G.

    Args:
        a: size of left, > 0.
        c: size of right, > 0. a = c is balanced.
        rows: [row, k], orthonormal columns that span the columns of every gradient.
        columns: [column, k], orthonormal columns that span its rows.
        hidden: inner size, at least k.
        seed: of the rotation of the hidden basis.

    Returns:
        left [row, hidden] = a rows B, right [hidden, column] = c Bᵀ columnsᵀ, with orthonormal rows B.

    Raises:
        ValueError: a or c <= 0, columns that are not orthonormal, hidden < k.

    Source: derived in chapter p1_factorising (I6); paper 1's line is the case of class-centred columns.
    """
    checks.positive("aligned_factors", a=a, c=c)
    rows, columns = np.asarray(rows, dtype=float), np.asarray(columns, dtype=float)
    checks.shape("aligned_factors", "columns", columns, (None, rows.shape[-1]))
    for name, basis in (("rows", rows), ("columns", columns)):
        off = np.abs(basis.T @ basis - np.eye(basis.shape[1])).max()
        if not off < 1e-8:
            raise ValueError(f"aligned_factors: {name} is off orthonormal by {off:.2g}; expected orthonormal columns. Take the Q of a QR.")
    checks.integer_at_least("aligned_factors", rows.shape[1], hidden=hidden)
    basis = _rotation(hidden, seed)[: rows.shape[1]]  # [k, hidden]
    return a * rows @ basis, c * basis.T @ columns.T


def aligned_rate(a: ArrayLike, c: ArrayLike, eta: float = 1.0):
    """I6: the learning rate that a collapsed matrix would need to move as the aligned factors do, eta (a² + c²).

    Args:
        a, c: sizes of the factors as in `aligned_factors`, any shape.
        eta: rate of the factors, > 0.

    Returns:
        same shape, per unit of time.

    Raises:
        ValueError: eta <= 0, NaN.

    Source: derived in chapter p1_factorising (I6).
    """
    checks.positive("aligned_rate", eta=eta)
    checks.finite("aligned_rate", a=a, c=c)
    return eta * (np.asarray(a, dtype=float) ** 2 + np.asarray(c, dtype=float) ** 2)


@dataclass(frozen=True)
class SoftmaxRegression:
    """The smallest honest loss for a circuit: cross-entropy of softmax(inputs @ W), with its exact gradient.

    Args:
        inputs: [example, row], what the circuit reads (for OV: the attention-weighted one-hots).
        labels: [example] classes from 0 to column - 1.
        columns: number of classes.

    Raises:
        ValueError: shapes that don't fit, NaN, labels outside the classes.

    Source: standard; used in chapter p1_factorising.
    """

    inputs: np.ndarray
    labels: np.ndarray
    columns: int

    def __post_init__(self):
        checks.shape("SoftmaxRegression", "inputs", self.inputs, (None, None))
        checks.finite("SoftmaxRegression", inputs=self.inputs)
        checks.shape("SoftmaxRegression", "labels", self.labels, (len(self.inputs),))
        checks.integer_at_least("SoftmaxRegression", 2, columns=self.columns)
        checks.in_closed("SoftmaxRegression", 0, self.columns - 1, labels=self.labels)

    def loss(self, product: np.ndarray) -> np.ndarray:
        """Mean cross-entropy [...] in nats of W [..., row, column]. Source: standard."""
        logits = self.inputs @ product  # [..., example, column]
        picked = np.take_along_axis(logits, np.broadcast_to(self.labels[:, None], (*logits.shape[:-1], 1)), -1)[..., 0]
        return (logsumexp(logits, axis=-1) - picked).mean(-1)

    def gradient(self, product: np.ndarray) -> np.ndarray:
        """G = dL/dW [..., row, column]. Source: standard."""
        residual = softmax(self.inputs @ product, axis=-1) - np.eye(self.columns)[self.labels]  # [..., example, column]
        return self.inputs.T @ residual / len(self.labels)


def random_problem(seed: int, rows: int = 5, columns: int = 3, examples: int = 23) -> SoftmaxRegression:
    """A softmax regression on Gaussian inputs and labels without pattern: no symmetry that could make an identity true by luck.

    Args:
        seed: of inputs and labels.
        rows, columns, examples: sizes.

    Returns:
        SoftmaxRegression.

    Raises:
        ValueError: sizes < 1, a negative seed.

    Source: chapter p1_factorising.
    """
    checks.integer_at_least("random_problem", 1, rows=rows, examples=examples)
    checks.integer_at_least("random_problem", 2, columns=columns)
    checks.integer_at_least("random_problem", 0, seed=seed)
    random = np.random.default_rng([seed, 1])
    return SoftmaxRegression(random.standard_normal((examples, rows)), random.integers(columns, size=examples), columns)


def random_factors(seed: int, rows: int = 5, columns: int = 3, hidden: int = 7, scale: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Independent Gaussian factors, in general unbalanced.

    Args:
        seed: of both.
        rows, columns, hidden: sizes.
        scale: standard deviation of the entries, > 0.

    Returns:
        left [row, hidden], right [hidden, column].

    Raises:
        ValueError: sizes < 1, scale <= 0, a negative seed.

    Source: chapter p1_factorising.
    """
    checks.integer_at_least("random_factors", 1, rows=rows, columns=columns, hidden=hidden)
    checks.integer_at_least("random_factors", 0, seed=seed)
    checks.positive("random_factors", scale=scale)
    random = np.random.default_rng([seed, 2])
    return scale * random.standard_normal((rows, hidden)), scale * random.standard_normal((hidden, columns))


def _times(where: str, times: ArrayLike) -> np.ndarray:
    times = np.asarray(times, dtype=float)
    checks.finite(where, times=times)
    if times.ndim != 1 or len(times) < 2 or times[0] != 0 or not np.all(np.diff(times) > 0):
        raise ValueError(f"{where}: times = {times.tolist()}; expected increasing times that start at 0.")
    return times


def _integrate(where: str, start: Sequence[np.ndarray], velocity, times: ArrayLike, rtol: float) -> list[np.ndarray]:
    """Adaptive eighth-order integration of several matrices at once; each comes back as [time, *shape]."""
    times = _times(where, times)
    checks.positive(where, rtol=rtol)
    shapes = [np.shape(matrix) for matrix in start]
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]

    def unpack(flat):
        return [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(np.split(flat, cuts, axis=-1), shapes, strict=True)]

    def field(_, flat):
        return np.concatenate([np.ravel(part) for part in velocity(*unpack(flat))])

    flat = np.concatenate([np.ravel(matrix) for matrix in start]).astype(float)
    done = solve_ivp(field, (0.0, times[-1]), flat, method=DOP853, t_eval=times, rtol=rtol, atol=rtol / 100)
    if not done.success or not np.all(np.isfinite(done.y)):
        raise ValueError(f"{where}: the integration stopped at t = {done.t[-1]:g}: {done.message} Shorten `times` or look at the gradient.")
    return unpack(done.y.T)


def factor_flow(
    left: np.ndarray, right: np.ndarray, gradient: Gradient, times: ArrayLike, eta: float = 1.0, rtol: float = RTOL
) -> tuple[np.ndarray, np.ndarray]:
    """Gradient flow of two factors, by an adaptive integrator whose error is far below every effect we look for.

    Args:
        left: [row, hidden], start.
        right: [hidden, column], start.
        gradient: function W -> dL/dW.
        times: [time], increasing from 0, in units of step · learning rate when eta = 1.
        eta: learning rate, > 0.
        rtol: relative tolerance per step; the absolute one is a hundredth of it.

    Returns:
        left [time, row, hidden] and right [time, hidden, column].

    Raises:
        ValueError: shapes that don't fit, eta <= 0, times that don't increase from 0, a flow that leaves the finite numbers.

    Source: definition; checked against I3 in chapter p1_factorising.
    """
    left, right = _factors("factor_flow", left, right)
    _matched("factor_flow", left, right, gradient(left @ right))
    checks.positive("factor_flow", eta=eta)

    def velocity(left, right):
        d_left, d_right = factor_gradients(left, right, gradient(left @ right))
        return -eta * d_left, -eta * d_right

    first, second = _integrate("factor_flow", (left, right), velocity, times, rtol)
    return first, second


def closed_flow(
    product: np.ndarray, p: np.ndarray, r: np.ndarray, gradient: Gradient, times: ArrayLike, eta: float = 1.0, rtol: float = RTOL
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """I3 integrated: the product and both preconditioners over time, without factors.

    Args:
        product, p, r: start, as in `closed_velocity`.
        gradient, times, eta, rtol: as in `factor_flow`.

    Returns:
        W [time, row, column], P [time, row, row], R [time, column, column].

    Raises:
        ValueError: as `closed_velocity` and `factor_flow`.

    Source: derived in chapter p1_factorising (I3).
    """

    def velocity(product, p, r):
        return closed_velocity(product, p, r, gradient(product), eta)

    w, left_square, right_square = _integrate("closed_flow", (np.asarray(product), np.asarray(p), np.asarray(r)), velocity, times, rtol)
    return w, left_square, right_square


def balanced_flow(product: np.ndarray, gradient: Gradient, times: ArrayLike, eta: float = 1.0, rtol: float = RTOL) -> np.ndarray:
    """I5 integrated: W' = -eta ((W Wᵀ)^(1/2) G + G (Wᵀ W)^(1/2)), closed in W alone.

    It equals the product of the flowing factors when these start balanced, and differs when they don't.

    Args:
        product: W [row, column], start.
        gradient, times, eta, rtol: as in `factor_flow`.

    Returns:
        [time, row, column].

    Raises:
        ValueError: as `factor_flow`.

    Source: derived in chapter p1_factorising (I5).
    """
    checks.positive("balanced_flow", eta=eta)

    def velocity(product):
        p, r = balanced_preconditioners(product)
        return (-eta * rescaled(p, gradient(product), r),)

    return _integrate("balanced_flow", (_matrix("balanced_flow", product),), velocity, times, rtol)[0]


def preconditioned_flow(
    product: np.ndarray, p: np.ndarray, r: np.ndarray, gradient: Gradient, times: ArrayLike, eta: float = 1.0, rtol: float = RTOL
) -> np.ndarray:
    """The control: W' = -eta (P G + G R) with preconditioners frozen at the values given.

    With P = R = identity / 2 this is plain gradient flow of a collapsed matrix.

    Args:
        product: W [row, column], start.
        p: [row, row], kept for ever.
        r: [column, column], kept for ever.
        gradient, times, eta, rtol: as in `factor_flow`.

    Returns:
        [time, row, column].

    Raises:
        ValueError: as `factor_flow`.

    Source: negative control of chapter p1_factorising.
    """
    checks.positive("preconditioned_flow", eta=eta)
    product = _matrix("preconditioned_flow", product)
    checks.shape("preconditioned_flow", "p", p, (product.shape[0],) * 2)
    checks.shape("preconditioned_flow", "r", r, (product.shape[1],) * 2)
    checks.finite("preconditioned_flow", p=p, r=r)
    return _integrate("preconditioned_flow", (product,), lambda w: (-eta * rescaled(p, gradient(w), r),), times, rtol)[0]


def gradient_descent(
    left: np.ndarray, right: np.ndarray, gradient: Gradient, eta: float, steps: int, every: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Plain gradient descent on two factors.

    Args:
        left: [..., row, hidden], start.
        right: [..., hidden, column], start.
        gradient: function W -> dL/dW.
        eta: learning rate, > 0; `steps` steps are a time of eta · steps.
        steps: number of steps, >= 1.
        every: keep each so-manieth step; must divide `steps`.

    Returns:
        left [kept, ..., row, hidden] and right [kept, ..., hidden, column], the start included.

    Raises:
        ValueError: eta <= 0, steps < 1, `every` that doesn't divide, shapes that don't fit, a run that diverges.

    Source: definition of gradient descent.
    """
    checks.positive("gradient_descent", eta=eta)
    checks.integer_at_least("gradient_descent", 1, steps=steps, every=every)
    if steps % every:
        raise ValueError(f"gradient_descent: every = {every} does not divide steps = {steps}; expected a divisor.")
    left, right = _factors("gradient_descent", left, right)
    _matched("gradient_descent", left, right, gradient(left @ right))
    kept = [(left, right)]
    for step in range(1, steps + 1):
        slope = gradient(left @ right)
        left, right = left - eta * slope @ _transposed(right), right - eta * _transposed(left) @ slope
        if step % every == 0:
            if not np.all(np.isfinite(left)):
                raise ValueError(f"gradient_descent: left the finite numbers by step {step} at eta = {eta:g}; take a smaller rate.")
            kept.append((left, right))
    return np.stack([pair[0] for pair in kept]), np.stack([pair[1] for pair in kept])


def drift_slope(left: np.ndarray, right: np.ndarray, gradient: Gradient, times: ArrayLike) -> np.ndarray:
    """First-order prediction of how far gradient descent takes Delta, per unit of learning rate.

    A step adds eta² D with D = right Gᵀ G rightᵀ - leftᵀ G Gᵀ left, and a stretch of time dt holds dt/eta steps. So over a time T
    Delta moves by eta times the integral of D along the flow, up to order eta².

    Args:
        left, right: start of the flow.
        gradient: function W -> dL/dW.
        times: [time], increasing from 0, fine enough for Simpson's rule.

    Returns:
        [hidden, hidden], the integral of D; times eta it is the predicted drift.

    Raises:
        ValueError: as `factor_flow`.

    Source: derived in chapter p1_factorising (I4).
    """
    lefts, rights = factor_flow(left, right, gradient, times)
    added = imbalance_step(lefts, rights, gradient(lefts @ rights), eta=1.0)  # [time, hidden, hidden]
    return simpson(added, x=np.asarray(times, dtype=float), axis=0)
