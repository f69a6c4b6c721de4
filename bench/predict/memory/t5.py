"""What transformers' T5 keeps for backward, tensor by tensor, and what it needs for a moment.

Every term is a tensor that autograd saves in transformers 5's modeling_t5.py; the tests hold their sum against torch's
own `saved_tensors_hooks`. Bytes are those of one rank and one micro-batch.
"""

import itertools

from bench.models.t5 import Shape
from bench.predict.memory.segments import Segment, Stack, Workload
from bench.spec import FULL
from bench.stacks import Module, Tensors

INDEX = 8
"""Bytes of a token or a bucket of the position bias: int64."""
RANDOM_STATE = {"cpu": 5056, "cuda": 5056 + 16}
"""Bytes that a checkpoint keeps to draw the same numbers again: torch's Mersenne twister; a GPU's seed and offset."""
FUSED_QUERIES = 32
"""Rows to which torch's memory-efficient attention rounds up its log-sum-exp."""
ACTIVATION = {"gelu_new": (4, 0), "silu": (1, 0), "relu": (1, 1)}
"""Tensors as wide as d_ff that an activation saves, and whether the last of them is its output, which is saved anyway:
gelu_new is written out in Python and keeps x, x/2, tanh and 1 + tanh."""

_TABLE, _INNER, _WIDE, _NORM, _BIAS = range(5)  # places in `tensors`


def tensors(shape: Shape) -> list[Tensors]:
    """Return the parameters by size; those shared count once."""
    s, layers = shape, shape.encoder_layers + shape.decoder_layers
    return [
        Tensors(s.vocab * s.d_model, 2 if s.separate_head else 1),
        Tensors(s.d_model * s.d_inner, 4 * (layers + s.decoder_layers)),
        Tensors(s.d_model * s.d_ff, (3 if s.gated else 2) * layers),
        Tensors(s.d_model, 2 * s.encoder_layers + 3 * s.decoder_layers + 2),
        Tensors(s.relative_attention_buckets * s.heads, 2),
    ]


def modules(shape: Shape) -> list[Module]:
    """Return the modules in the order of forward; layers, activations and dropouts are stops too."""
    segments, blocks, weights = itertools.count(), itertools.count(), itertools.count(1)  # weight 0: the embedding
    found: list[Module] = []

    def part(sizes: list[int | None], block: int | None = None) -> None:
        here = next(segments)
        for size in sizes:
            if size is None:
                found.append(Module(here, block=block))
            elif size == _TABLE:
                found.append(Module(here, 0, size, indexed=True, completes=here == 0))
            else:
                found.append(Module(here, next(weights), size, block, indexed=size == _BIAS))

    part([_TABLE])  # where its gradient is complete
    for decoder, layers in enumerate((shape.encoder_layers, shape.decoder_layers)):
        part([_TABLE])
        for number in range(layers):
            block = next(blocks)
            part(_attention_modules(biased=number == 0), block)
            if decoder:
                part(_attention_modules(biased=False), block)
            part(_feed_forward_modules(shape), block)
        part([_NORM, None])
    own = shape.separate_head
    found.append(Module(next(segments), next(weights) if own else 0, _TABLE, completes=own))
    return [*found, Module(next(segments))]


def _attention_modules(*, biased: bool) -> list[int | None]:
    return [None, _NORM, None, _INNER, _INNER, _INNER, *([_BIAS] if biased else []), _INNER, None]


def _feed_forward_modules(s: Shape) -> list[int | None]:
    return [None, _NORM, None, _WIDE, None, *([_WIDE] if s.gated else []), None, _WIDE, None]


def stacks(shape: Shape, load: Workload) -> list[Stack]:
    """Return the forward pass in order, from the encoder's embedding to the loss."""
    head = [_head(shape, load), _loss(shape, load)]
    if load.chunk:
        head = [_chunked_loss(shape, load), Segment(0, logits=True)]
    return [Stack([_complete(shape)]), *_encoder(shape, load), *_decoder(shape, load), Stack(head)]


def extra_embeddings(shape: Shape) -> int:
    """Return the elements that building allocates and throws away: each stack's own embedding, before it is shared, and
    a head that is tied."""
    return (2 if shape.separate_head else 3) * shape.vocab * shape.d_model


def _encoder(s: Shape, w: Workload) -> list[Stack]:
    rows = w.micro * w.encoder
    block = [_attention(s, w, w.encoder, w.encoder, biased=True), _feed_forward(s, w, rows)]
    ends = _embedding(s, w, w.encoder, decoder=False), _final_norm(s, w, rows)
    return _stack(s, w, ends, block, w.encoder, s.encoder_layers)


def _decoder(s: Shape, w: Workload) -> list[Stack]:
    rows = w.micro * w.decoder
    cross = _attention(s, w, w.decoder, w.encoder, biased=False)
    block = [_attention(s, w, w.decoder, w.decoder, biased=True, causal=True), cross, _feed_forward(s, w, rows)]
    # the gradient of the encoder's output waits for the encoder while the decoder's blocks add to it
    waiting = w.micro * w.encoder * s.d_model * w.width
    block = [_with_standing(part, waiting) for part in block]
    embedding = _embedding(s, w, w.decoder, decoder=True)
    if _fused(w, biased=False) or w.checkpointing:  # cross-attention's bias: zeros, made once
        embedding = embedding._replace(saved=embedding.saved + s.heads * w.decoder * w.encoder * w.width)
    return _stack(s, w, (embedding, _final_norm(s, w, rows)), block, w.decoder, s.decoder_layers)


def _stack(
    s: Shape, w: Workload, ends: tuple[Segment, Segment], block: list[Segment], length: int, layers: int
) -> list[Stack]:
    """Return a stack from its embedding to its last norm; checkpointed, a block keeps its input and is run again before
    its backward. Its position bias lives while its blocks run, or as long as their checkpoints; the bias's gradient
    from the last block's backward on."""
    embedding, norm = ends
    bias = s.heads * length * length * w.width
    if w.checkpointing:
        embedding = embedding._replace(saved=embedding.saved + bias)
        block = _checkpointed(block, w.micro * length * s.d_model * w.width + RANDOM_STATE[w.device])
    else:
        block = [part._replace(forward=part.forward + bias) for part in block]
    earlier = [_with_standing(part, bias) for part in block]
    return [Stack([embedding]), Stack(earlier, layers - 1), Stack(block), Stack([norm])]


def _with_standing(part: Segment, waiting: int) -> Segment:
    """A part in whose backward `waiting` bytes more live, from its beginning to its end."""
    return part._replace(backward=part.backward + waiting, standing=part.standing + waiting)


def _checkpointed(block: list[Segment], kept: int) -> list[Segment]:
    """A block of which `kept` bytes stay until it is run again; then backward frees part by part what that saved."""
    until = itertools.accumulate(part.saved for part in block)
    return [
        part._replace(
            saved=0 if number else kept,
            forward=part.saved + part.forward,
            backward=saved + max(part.forward, part.backward),
            standing=saved,
        )
        for number, (part, saved) in enumerate(zip(block, until, strict=True))
    ]


def _embedding(s: Shape, w: Workload, length: int, *, decoder: bool) -> Segment:
    """Embedding of a stack, with the buckets of its position bias. One matrix serves both stacks: until the encoder's
    backward ends, the decoder's share of its gradient waits and, where the head is no other matrix, that of both. To
    the head's, which nn.Linear leaves transposed, torch adds in a third tensor."""
    saved = INDEX * (w.micro * length + length * length) + _mask(w, w.micro * length * s.d_model)
    table, bias = s.vocab * s.d_model, s.relative_attention_buckets * s.heads
    if decoder and s.separate_head:
        return Segment(saved, parameters=bias, carried=table)
    return Segment(saved, backward=table * w.width, parameters=bias, transposed=table if decoder else 0)


def _complete(s: Shape) -> Segment:
    """The end of the encoder's backward, where nothing of the embedding's gradient waits any more."""
    table = s.vocab * s.d_model
    return Segment(0, parameters=table, largest=table, carried=-table)


def _attention(s: Shape, w: Workload, queries: int, keys: int, *, biased: bool, causal: bool = False) -> Segment:
    """One attention sub-layer with its norm; `biased` is self-attention, whose position bias is learned."""
    rows = w.micro * queries
    query, key = rows * s.d_inner, w.micro * keys * s.d_inner
    scores = w.micro * s.heads * queries * keys
    kept, forward, backward = _kernel(s, w, query, key, scores, queries, biased=biased)
    matrix = s.d_model * s.d_inner
    mask = queries * keys if causal and w.attention == "sdpa" else 0  # each layer makes a mask of booleans
    return Segment(
        saved=_norm(s, w, rows) + kept + mask + _mask(w, rows * s.d_model) + _clamp(s, w, rows),
        forward=forward,
        backward=backward + rows * s.d_model * w.width,
        parameters=4 * matrix + s.d_model,
        largest=matrix,
    )


def _kernel(
    s: Shape, w: Workload, query: int, key: int, scores: int, queries: int, *, biased: bool
) -> tuple[int, int, int]:
    """Return bytes saved, and needed in forward and in backward, by the attention that torch chooses.

    The position bias is a mask that needs a gradient. No flash kernel takes one: sdpa writes attention out in fp32 on
    a CPU (where it needs none, in cross-attention, it does not) and takes the memory-efficient kernel on a GPU.
    """
    if not _fused(w, biased=biased):
        m = w.width if w.attention == "eager" else FULL
        dropped = (m + (m if w.device == "cpu" else 1)) * scores if w.dropout else 0
        saved = m * (query + 2 * key + scores) + dropped + w.width * query
        # a second one of scores; sdpa scales queries and keys, and asks of every score whether it is minus infinity
        forward = m * (scores + key) + (0 if w.attention == "eager" else scores + m * query)
        if m > w.width:  # queries, keys and values in both widths
            forward += m * query + 2 * w.width * key
        # two gradients of scores, when the output has gone; where scores are few, before that
        return saved, forward, max(0, 2 * m * scores - w.width * query)
    rounded = -(-queries // FUSED_QUERIES) * FUSED_QUERIES if w.device == "cuda" else queries
    saved = w.width * 2 * (query + key) + FULL * w.micro * s.heads * rounded
    backward = w.width * (query + 2 * key)
    if biased and w.attention == "sdpa":  # a contiguous bias for every layer, and its gradient for every sample
        saved += w.width * scores // w.micro
        backward += w.width * scores
    return saved, 0, backward


def _fused(w: Workload, *, biased: bool) -> bool:
    """Whether scores are never written out. With checkpointing transformers has zeros in cross-attention's place of a
    bias need a gradient, too."""
    if w.attention == "sdpa" and w.device == "cpu":
        return not (biased or w.dropout or w.checkpointing)
    return w.attention != "eager"


def _feed_forward(s: Shape, w: Workload, rows: int) -> Segment:
    wide = rows * s.d_ff
    kept, is_output = ACTIVATION[s.activation]
    # what the gate's product saves, and the input of the last matrix; a plain activation's output is that input
    count = kept + 1 + (2 - is_output if s.gated else -is_output * (not w.dropout))
    matrix = s.d_model * s.d_ff
    return Segment(
        saved=_norm(s, w, rows) + count * wide * w.width + _mask(w, wide + rows * s.d_model) + _clamp(s, w, rows),
        forward=wide * w.width,
        backward=(2 * wide + rows * s.d_model) * w.width,
        parameters=(3 if s.gated else 2) * matrix + s.d_model,
        largest=matrix,
    )


def _final_norm(s: Shape, w: Workload, rows: int) -> Segment:
    """Its output is what cross-attention or the head saves, after dropout or scaling where there is one."""
    saved = _norm(s, w, rows) + _mask(w, rows * s.d_model)
    return Segment(saved, parameters=s.d_model, largest=s.d_model)


def _norm(s: Shape, w: Workload, rows: int) -> int:
    """Input, normalised input and output, and one scale per token; below fp32 also the input in fp32."""
    return rows * s.d_model * (3 * w.width + (FULL if w.width < FULL else 0)) + FULL * rows


def _mask(w: Workload, elements: int) -> int:
    """Dropout's mask: as wide as what it masks on a CPU, a byte per element on a GPU."""
    return elements * (w.width if w.device == "cpu" else 1) if w.dropout else 0


def _clamp(s: Shape, w: Workload, rows: int) -> int:
    """What transformers' clamp of fp16 activations keeps: its input."""
    return rows * s.d_model * w.width if w.fp16 else 0


def _head(s: Shape, w: Workload) -> Segment:
    """The matrix from states to logits; tied, its gradient waits for the embedding's."""
    rows, table = w.micro * w.decoder, s.vocab * s.d_model
    logits = rows * s.vocab * w.width
    own = table if s.separate_head else 0
    backward = logits + rows * s.d_model * w.width
    return Segment(0, forward=logits, backward=backward, parameters=own, largest=own, carried=table - own, logits=True)


def _loss(s: Shape, w: Workload) -> Segment:
    """Cross-entropy in the run's precision: log-probabilities are kept, the logits beside them are dropped, and in
    backward two gradients of their size lie beside them."""
    logits = w.micro * w.decoder * s.vocab * w.width
    return Segment(logits + INDEX * w.micro * w.decoder, forward=logits, backward=2 * logits, logits=True)


def _chunked_loss(s: Shape, w: Workload) -> Segment:
    """Head and loss together (bench.models.modules.chunked_loss): the gradients of states and matrix are made in
    forward, beside one chunk's logits, in the run's precision and in fp32. Backward hands the matrix's on as it is."""
    rows, table = w.micro * w.decoder, s.vocab * s.d_model
    chunk = min(w.chunk or rows, rows) * s.vocab
    own = table if s.separate_head else 0
    return Segment(
        saved=w.width * (rows * s.d_model + table), forward=(w.width + FULL) * chunk, backward=-w.width * table,
        parameters=own, largest=own, carried=table - own, logits=True,
    )  # fmt: skip
