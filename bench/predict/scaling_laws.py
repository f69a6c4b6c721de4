"""Scaling laws: the loss that a network of N parameters reaches, the tokens and steps needed for it, and the critical
batch size. Also the global batches of published trainings.

Losses are in nats per token; batches and data are in tokens. The authors of each law fitted it to decoder-only
transformers, with their own web text and tokenizer. A loss with another network, text or tokenizer is not comparable.

Cost of a larger batch (arXiv 1812.06162, and 2001.08361 section 5.1): S_min is the number of steps to reach a given
loss with a very large batch. E_min = S_min · B_crit is the number of tokens to reach it with a very small batch. With a
batch of B tokens, it takes S = S_min (1 + B_crit / B) steps and E = B S = E_min (1 + B / B_crit) tokens. At the
critical batch B_crit, steps and tokens are both twice their minimum.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from bench.core.errors import UserError, suggest_nearest
from bench.core.network import Attention, count_parameters
from bench.core.spec import RunSpec
from bench.predict.workload import get_network

_CRITICAL_TOKENS, _ALPHA_B = 2.1e8, 0.21
"""Constants B* (tokens) and α_B of the critical batch, from arXiv 2001.08361, Appendix A."""


def compute_critical_batch(loss: float) -> float:
    """Return the critical batch size at a loss, in tokens: B* / L^(1/α_B), arXiv 2001.08361 equation 5.3.

    The critical batch grows as the loss falls, so it is largest at the final loss of a training.
    """
    return _CRITICAL_TOKENS / math.pow(loss, 1 / _ALPHA_B)


@dataclass(frozen=True)
class KaplanLaw:
    """Scaling law of arXiv 2001.08361: L(N, S_min) = (N_c/N)^α_N + (S_c/S_min)^α_S, equation 5.6 with the constants of
    table 3. N excludes the embedding. Data is assumed unlimited, without repetition."""

    n_c: float = 6.5e13
    alpha_n: float = 0.077
    s_c: float = 2.1e3
    alpha_s: float = 0.76
    source: str = "Kaplan et al., arXiv 2001.08361"
    counts_embedding: bool = False

    def compute_floor(self, parameters: float) -> float:
        """Return the lowest loss that a model with this number of parameters approaches with unlimited data."""
        return math.pow(self.n_c / parameters, self.alpha_n)

    def compute_loss(self, parameters: float, least_steps: float) -> float:
        """Return the loss after `least_steps` (S_min) steps with batches far above the critical batch."""
        return self.compute_floor(parameters) + math.pow(self.s_c / least_steps, self.alpha_s)

    def compute_least_steps(self, parameters: float, loss: float) -> float:
        """Return S_min: the steps to reach `loss` with batches far above the critical batch."""
        return self.s_c / math.pow(loss - self.compute_floor(parameters), 1 / self.alpha_s)

    def compute_least_tokens(self, parameters: float, loss: float) -> float:
        """Return E_min: the tokens to reach `loss` with batches far below the critical batch. `loss` must be above
        `compute_floor`."""
        return self.compute_least_steps(parameters, loss) * compute_critical_batch(loss)


@dataclass(frozen=True)
class ParametricLaw:
    """Scaling law L(N, D) = E + A/N^α + B/D^β, where N counts all parameters and D all tokens. The law was fitted to
    runs whose batches were not above the critical batch.

    Other code needs E_min, the number of tokens to reach a loss with very small batches. This class returns the D of
    the law in place of E_min. However, the fitted runs had larger batches and needed more tokens than E_min, so E_min
    is overestimated.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    source: str
    counts_embedding: bool = True

    def compute_loss(self, parameters: float, tokens: float) -> float:
        return self.compute_floor(parameters) + self.b / math.pow(tokens, self.beta)

    def compute_floor(self, parameters: float) -> float:
        """Return the lowest loss that a model with this number of parameters approaches with unlimited data."""
        return self.e + self.a / math.pow(parameters, self.alpha)

    def compute_least_tokens(self, parameters: float, loss: float) -> float:
        """Return E_min: the tokens to reach `loss` with batches far below the critical batch. `loss` must be above
        `compute_floor`."""
        return float((self.b / (loss - self.compute_floor(parameters))) ** (1 / self.beta))


ScalingLaw = KaplanLaw | ParametricLaw
"""A published scaling law. `parameters` are counted as in its source, with or without the embedding."""
KAPLAN = KaplanLaw()
CHINCHILLA = ParametricLaw(1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al., arXiv 2203.15556, approach 3")
CHINCHILLA_CORRECTED = ParametricLaw(
    1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al., arXiv 2404.10102, a correction of 2203.15556"
)
LAWS: dict[str, ScalingLaw] = {"kaplan": KAPLAN, "chinchilla": CHINCHILLA, "chinchilla_corrected": CHINCHILLA_CORRECTED}


def find_law(name: str) -> ScalingLaw:
    """Return the scaling law with this name. Raise UserError with the nearest name if there is none."""
    if name not in LAWS:
        raise UserError(f"law={name}", "no such scaling law", suggest_nearest(name, LAWS))
    return LAWS[name]


@dataclass(frozen=True)
class TrainingNeed:
    """Number of tokens needed to reach a loss, as a function of the batch size."""

    loss: float
    least_tokens: float  # E_min
    critical_batch: float  # tokens per step

    def compute_tokens(self, batch: float) -> float:
        """Return the number of tokens needed to reach the target loss if each step uses `batch` tokens."""
        return self.least_tokens * (1 + batch / self.critical_batch)


def compute_need(law: ScalingLaw, parameters: float, loss: float) -> TrainingNeed:
    """Return the tokens that a model with this number of parameters needs to reach `loss`. Raise UserError if no
    amount of data reaches this loss."""
    floor = law.compute_floor(parameters)
    if not loss > floor:
        rule = f"{parameters:.3g} parameters do not get below {floor:.4g} with any data, by {law.source}"
        raise UserError(f"loss={loss:g}", rule, "set a higher loss, or use a larger model")
    return TrainingNeed(loss, law.compute_least_tokens(parameters, loss), compute_critical_batch(loss))


REFERENCE_BATCHES = {
    "t5": ((0.0, "mT5", 2**20),),
    "llama": ((0.0, "Llama 2", 2**22),),
    "gpt": (
        (0.0, "GPT-3 of 125M", 500_000), (1e9, "GPT-3 of 1.3B", 1_000_000), (5e9, "GPT-3 of 6.7B", 2_000_000),
        (5e10, "GPT-3 of 175B", 3_200_000),
    ),
}  # fmt: skip
"""Global batches of published pre-trainings, by model family. Each entry has the smallest number of model parameters
for which the entry applies, the name of the published model, and the tokens per optimizer step (sum over encoder and
decoder tokens). mT5: arXiv 2010.11934; Llama 2: 2307.09288; GPT-3: 2005.14165, table 2.1."""
FAR_BATCH = 2
"""A global batch that is more than this multiple of the batch of a published training is reported as unusual."""


class ReferenceBatch(NamedTuple):
    """Global batch of a published training of a model family, in tokens per optimizer step."""

    name: str
    tokens: int


def find_reference_batch(spec: RunSpec) -> ReferenceBatch | None:
    """Return the global batch of a published training of the same model family. If several trainings are known, choose
    the training of the largest model that is not larger than the model of `spec`. None if there is no such training."""
    network = get_network(spec)
    rotary = any(isinstance(part, Attention) and part.rotary for stack in network.stacks for part in stack.block)
    known = REFERENCE_BATCHES.get("llama" if rotary else spec.model.family, ())
    parameters = count_parameters(network)
    found = [ReferenceBatch(name, tokens) for least, name, tokens in known if parameters >= least]
    return found[-1] if found else None
