"""DeepSeek-V4: embedding, decoder layers over S residual streams, head."""

from __future__ import annotations

import torch

from metainfer.arch.record import Arch, LayerArch
from metainfer.arch.stages import stage_of
from metainfer.comm.group import Group
from metainfer.core.errors import MetainferError
from metainfer.kernels.registry import Registry
from metainfer.nn.attention import Attention
from metainfer.nn.builder import LayerBuilder, SideStream
from metainfer.nn.cache import CacheStorage
from metainfer.nn.hyper import HyperConnection, HyperHead, Streams, WrittenStreams
from metainfer.nn.inputs import DecodeInputs, StepInputs
from metainfer.nn.linear import dense_fp32
from metainfer.nn.moe import MixtureOfExperts
from metainfer.nn.placement import place
from metainfer.nn.share_indexer import ShareIndexer
from metainfer.nn.step_index import StepIndex
from metainfer.nn.step_indexer import StepIndexer
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import FP32_CACHES, CacheFormats
from metainfer.weights.load import Checkpoint


class DecoderLayer:
    """Attention and experts, each between streams that are mixed before and after it."""

    def __init__(self, build: LayerBuilder, layer: LayerArch) -> None:
        prefix = f"layers.{layer.index}"
        self._around_attention = HyperConnection(build, f"{prefix}.hc_attn", f"{prefix}.attn_norm")
        self._attention = Attention(build, layer)
        self._around_experts = HyperConnection(build, f"{prefix}.hc_ffn", f"{prefix}.ffn_norm")
        self._experts = MixtureOfExperts(build, layer)

    def __call__(self, streams: Streams, step: StepIndex, cache: CacheStorage) -> Streams:
        """The streams of the rows that go on. Takes the argument's."""
        streams = self._around_attention(
            streams, lambda x: (self._attention(x, step, cache),), step.wanted_rows_W
        )
        token_ids_T = step.wanted(step.token_ids_T)
        return self._around_experts(streams, lambda x: self._experts(x, token_ids_T, step))


class DeepseekV4:
    """The model of one rank, or the layers of its stage. Drafting blocks (`mtp.*`) are not used;
    `Checkpoint.unused` has them.

    Call `forward` and `logits` without gradients. Rows that are not finite stay so in their own
    sequence: no row reads another sequence's cache.

    Attributes:
        stage: which layers it has.
        weights_nbytes: bytes of all weights in the form they are kept in.
        kernels: every op that a layer bound, with its backend.
    """

    def __init__(
        self,
        arch: Arch,
        checkpoint: Checkpoint,
        *,
        registry: Registry,
        target: Target,
        kernel_order: str,
        group: Group,
        context: int = 1,
        expert: int = 1,
        stages: int = 1,
        kv_shards: int = 1,
        device: torch.device,
        compute_dtype: torch.dtype,
        stream_dtype: torch.dtype | None = None,
        draft_rows: int = 0,
        activations: str = "plain",
        caches: CacheFormats = FP32_CACHES,
        side_stream: SideStream | None = None,
    ) -> None:
        """Read all weights and bind all kernels.

        Args:
            kernel_order: as `Registry.bind` takes it.
            group: of all ranks.
            context, expert, stages, kv_shards: as `nn.placement.place` takes them.
            stream_dtype: format of the residual streams; None for the compute dtype.
            activations, caches, side_stream: as `nn.builder.LayerBuilder` takes them.
            draft_rows: as in `arch.cache_kinds.cache_kinds`; the cache must have the same.

        Raises:
            UserError: no backend that the order allows serves a layer.
            CheckpointError: a tensor is missing.
        """
        self._stream_dtype = stream_dtype or compute_dtype
        self._num_streams = arch.hc_mult
        self._draft_rows = draft_rows
        self._caches = caches
        placement = place(
            group,
            arch.num_layers,
            context=context,
            expert=expert,
            stages=stages,
            kv_shards=kv_shards,
        )
        self._group, self._pipe = placement.group, placement.pipe
        self.stage = stage_of(0, 1, arch.num_layers) if self._pipe is None else self._pipe.stage
        build = LayerBuilder(
            arch,
            checkpoint,
            registry=registry,
            target=target,
            kernel_order=kernel_order,
            placement=placement,
            device=device,
            compute_dtype=compute_dtype,
            stream_dtype=self._stream_dtype,
            activations=activations,
            caches=caches,
            side_stream=side_stream,
        )
        self._width = arch.hidden_size
        if self.stage.is_first:
            self._embed_VD = build.tensor("embed.weight")
        self._layers = [DecoderLayer(build, arch.layers[index]) for index in self.stage.layers]
        self._written = WrittenStreams(build)
        if self.stage.is_last:
            self._collapse = HyperHead(build, "hc_head", "norm")
            self._head = dense_fp32(build, ["head.weight"])
        self._indexer = StepIndexer(build, draft_rows)
        self._share_indexer = None
        if build.placement.by_tokens is not None:
            rows = build.placement.by_tokens.rows
            self._share_indexer = ShareIndexer(rows, self._indexer, device)
        self.weights_nbytes = build.weights_nbytes
        self.kernels = tuple(build.kernels)

    def forward(
        self, inputs: StepInputs | DecodeInputs, cache: CacheStorage
    ) -> torch.Tensor | None:
        """Run the rows of one step and write what later steps need into `cache`; returns the
        residual streams [W, S, D] after the last layer, of the rows that are wanted. None where
        another stage has that layer."""
        if cache.draft_rows != self._draft_rows:
            raise MetainferError(
                f"the cache has {cache.draft_rows} draft rows, the model {self._draft_rows}"
            )
        for word, has, wants in (
            ("latents", cache.formats.latent_format, self._caches.latent_format),
            ("index keys", cache.formats.key_format, self._caches.key_format),
        ):
            if has != wants:
                raise MetainferError(f"the cache keeps {word} as {has}, the model as {wants}")
        step = self._index(inputs, cache)
        streams = Streams(self._first_streams(step))
        for layer in self._layers[:-1]:
            streams = layer(streams, step, cache)
        if not self.stage.is_last:
            assert self._pipe is not None
            self._pipe.hand_on(self._written(self._layers[-1](streams, step, cache)))
            return None
        if isinstance(inputs, StepInputs):
            step = self._indexer.last_layer(step, inputs)
        streams_WSD = self._written(self._layers[-1](streams, step, cache))
        return streams_WSD if step.shares is None else step.shares.gather_wanted(streams_WSD)

    def _first_streams(self, step: StepIndex) -> torch.Tensor:
        """[T, S, D] before the first layer of this stage."""
        if self.stage.is_first:
            embedded_TD = self._embed_VD.index_select(0, step.token_ids_T).to(self._stream_dtype)
            return embedded_TD.unsqueeze(1).repeat(1, self._num_streams, 1)
        assert self._pipe is not None
        ids_T = step.token_ids_T
        shape = len(ids_T), self._num_streams, self._width
        return self._pipe.take(ids_T.new_empty(shape, dtype=self._stream_dtype))

    def _index(self, inputs: StepInputs | DecodeInputs, cache: CacheStorage) -> StepIndex:
        if isinstance(inputs, StepInputs):
            shared = None if self._share_indexer is None else self._share_indexer.index(inputs)
            return shared or self._indexer.index(inputs)
        if cache.spare_block is None:
            raise MetainferError("steps of fixed shapes need a cache with a spare block")
        return self._indexer.index_decode(inputs)

    def logits(self, streams_RSD: torch.Tensor) -> torch.Tensor:
        """fp32 [R, V] of the streams of chosen rows, on every rank of the last stage."""
        part_RV = self._head(self._collapse(streams_RSD))
        if self._group.size == 1:
            return part_RV
        parts_GRV = self._group.all_gather(part_RV).unflatten(0, (self._group.size, -1))
        return parts_GRV.transpose(0, 1).flatten(1)
