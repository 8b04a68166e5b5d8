"""The same SGD as `lib.train.counts`, with torch, many runs at once: any mixture of seeds, rates, schedules, starts and parametrisations.

For machines with a GPU, and as a second implementation to check the compiled one against. All runs share one set of operations, because
a collapsed circuit is a factorised one whose second factor is the identity and doesn't learn.
"""

import numpy as np
import torch

from lib.data import synthetic
from lib.device import device as default_device
from lib.train.counts import BLOCK, VOCABULARY, Arm, Diverged, initial

TOKENS = synthetic.SLOT_TOKENS


class BatchedRuns:
    """Runs of several arms and seeds, advanced together.

    Args:
        runs: (arm, seed) pairs; batch and length must agree, all else may differ. Stop rules are left to the caller.
        device: torch device; None = CUDA if there is one.
        dtype: torch.float64 or torch.float32.

    Raises:
        ValueError: no run, or runs of different batch or length.
    """

    def __init__(self, runs: list[tuple[Arm, int]], *, device: torch.device | None = None, dtype: torch.dtype = torch.float64):
        sizes = {(arm.batch, arm.length) for arm, _ in runs}
        if len(sizes) != 1:
            raise ValueError(f"BatchedRuns: {len(runs)} runs with (batch, length) in {sorted(sizes)}; expected at least one run, one size.")
        self.runs, self.device, self.dtype = list(runs), device or default_device(), dtype
        (batch, length), self.batch = next(iter(sizes)), next(iter(sizes))[0]
        seeds = sorted({seed for _, seed in runs})
        self.streams = [synthetic.Stream(seed, batch=batch, length=length) for seed in seeds]
        self._stream_of = [seeds.index(seed) for _, seed in runs]
        identity = np.eye(VOCABULARY)
        starts = [initial(arm, seed) for arm, seed in runs]
        self.W_Q = self._tensor([start["W_Q"] for start in starts])  # [run, class, d]
        self.W_K = self._tensor([start["W_K"] if len(start["W_K"]) else identity for start in starts])  # [run, token, d]
        self.W_V = self._tensor([start["W_V"] if len(start["W_V"]) else identity for start in starts])  # [run, token, hidden]
        self.W_O = self._tensor([start["W_O"][:, :VOCABULARY] for start in starts])  # [run, hidden, output]

        def column(values):
            return self._tensor(list(values))[:, None, None]  # [run, 1, 1]

        arms = [arm for arm, _ in runs]
        self._eta_qk = column(arm.eta_qk / np.sqrt(VOCABULARY) for arm in arms)
        self._eta_slope = column(arm.eta_slope / np.sqrt(VOCABULARY) for arm in arms)
        self._eta_ov = column(arm.eta_ov for arm in arms)
        self._two_qk = column(float(arm.factorised_attention) for arm in arms)
        self._two_ov = column(float(arm.factorised_output) for arm in arms)
        self._attended = column(float(arm.attended) for arm in arms)
        used = np.zeros((synthetic.CLASSES, VOCABULARY), bool)
        used[np.arange(synthetic.CLASSES)[:, None], TOKENS] = True
        self._unused = torch.as_tensor(~used, device=self.device)  # [class, token]
        self._query = self._tensor(np.eye(VOCABULARY)[list(synthetic.FIG2.query)])  # [class, token]
        self._label = self._tensor(np.eye(VOCABULARY)[list(synthetic.FIG2.label)])  # [class, output]
        self.step = 0
        self.losses: list[np.ndarray] = []  # per block of 50 steps: [run], nats
        self.failed: dict[int, str] = {}  # run -> what happened

    def _tensor(self, values) -> torch.Tensor:
        return torch.as_tensor(np.array(values), dtype=self.dtype, device=self.device)

    def _batches(self, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token counts [stream, step, batch, token] and one-hot classes [stream, step, batch, class]."""
        occurs, one_hot = [], []
        for stream in self.streams:
            counts, classes = stream.counts(steps)
            dense = np.zeros((steps, self.batch, VOCABULARY), np.uint8)
            np.put_along_axis(dense, TOKENS[classes], counts, -1)
            occurs.append(dense)
            one_hot.append(np.eye(synthetic.CLASSES, dtype=np.uint8)[classes])
        first, second = (torch.as_tensor(np.array(several)).to(self.device, self.dtype) for several in (occurs, one_hot))
        return first, second

    @torch.no_grad()
    def advance(self, steps: int) -> None:
        """Take some SGD steps with every run. Runs whose loss stops being finite are noted in `failed`; the others go on.

        Args:
            steps: a multiple of 50.

        Raises:
            Diverged: no run is left.
            ValueError: steps is not a positive multiple of 50.
        """
        if steps < BLOCK or steps % BLOCK:
            raise ValueError(f"BatchedRuns.advance: steps = {steps}; expected a positive multiple of {BLOCK}.")
        for _ in range(steps // BLOCK):
            occurs, one_hot = self._batches(BLOCK)
            total = torch.zeros(len(self.runs), dtype=torch.float64, device=self.device)
            for t in range(BLOCK):
                total += self._sgd_step(occurs[self._stream_of, t], one_hot[self._stream_of, t], self.step + t)
            self.step += BLOCK
            self.losses.append((total / BLOCK).cpu().numpy())
            for run in np.flatnonzero(~np.isfinite(self.losses[-1])):
                arm, seed = self.runs[run]
                self.failed.setdefault(
                    int(run),
                    f"the loss is not finite within steps {self.step - BLOCK} to {self.step} of arm {arm.name!r} (seed {seed}, "
                    f"eta_qk = {arm.eta_qk:g}, eta_ov = {arm.eta_ov:g}); lower the rates.",
                )
            if len(self.failed) == len(self.runs):
                raise Diverged(f"BatchedRuns: no run is left; the last: {self.failed[len(self.runs) - 1]}")

    def _sgd_step(self, occurs: torch.Tensor, one_hot: torch.Tensor, step: int) -> torch.Tensor:
        """One step of all runs; their losses [run] before it."""
        occurs = occurs + self._attended * (one_hot @ self._query)  # [run, batch, token]
        scores = (self.W_Q @ self.W_K.mT / VOCABULARY**0.5).masked_fill(self._unused, -torch.inf)  # [run, class, token]
        weight = torch.exp(scores - scores.amax(-1, keepdim=True))
        pattern = occurs * (one_hot @ weight)  # [run, batch, token]
        pattern = pattern / pattern.sum(-1, keepdim=True)
        hidden = pattern @ self.W_V  # [run, batch, hidden]
        log_p = torch.log_softmax(hidden @ self.W_O, -1)  # [run, batch, output]
        label = one_hot @ self._label
        loss = -(log_p * label).sum((-1, -2)) / self.batch
        to_logits = (log_p.exp() - label) / self.batch
        to_hidden = to_logits @ self.W_O.mT
        to_pattern = to_hidden @ self.W_V.mT
        to_scores = pattern * (to_pattern - (pattern * to_pattern).sum(-1, keepdim=True))
        to_circuit = one_hot.mT @ to_scores  # [run, class, token]
        eta_qk = self._eta_qk + self._eta_slope * step
        # All gradients before any update: each needs the old value of the other factor.
        to_Q, to_K = to_circuit @ self.W_K, to_circuit.mT @ self.W_Q
        to_O, to_V = hidden.mT @ to_logits, pattern.mT @ to_hidden
        self.W_Q -= eta_qk * to_Q
        self.W_K -= self._two_qk * eta_qk * to_K
        self.W_O -= self._eta_ov * to_O
        self.W_V -= self._two_ov * self._eta_ov * to_V
        return loss.double()

    def weights(self, run: int) -> dict[str, np.ndarray]:
        """Weights of one run, laid out as `counts.initial` has them (outputs without padding)."""
        arm = self.runs[run][0]
        none = np.empty((0, VOCABULARY))
        return {
            "W_Q": self.W_Q[run].cpu().numpy(),
            "W_K": self.W_K[run].cpu().numpy() if arm.factorised_attention else none,
            "W_V": self.W_V[run].cpu().numpy() if arm.factorised_output else none,
            "W_O": self.W_O[run].cpu().numpy(),
        }
