"""What several engines cannot do for the same reason."""

from bench.errors import UserError
from bench.spec import RunSpec


def check_unscaled(spec: RunSpec) -> None:
    """Raise UserError for what an engine cannot do that trains by torch's AdamW, and scales no loss."""
    if spec.optimizer.implementation == "native":
        rule = f"engine {spec.engine.name} has no optimizer of its own"
        raise UserError("optimizer.implementation=native", rule, "use torch or fused")
    if spec.precision == "fp16":
        rule = f"engine {spec.engine.name} has no loss scale"
        raise UserError("precision=fp16", rule, "choose precision=bf16, or engine=ddp")
