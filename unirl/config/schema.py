# SPDX-License-Identifier: Apache-2.0
"""The run's configuration: one keyword-only dataclass a section; every key of a recipe is a field here."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Literal

from unirl.sde import StepSet


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """`model.lora`: the adapter (peft). `targets` are public module names' last parts."""

    rank: int = 64
    alpha: int = 128
    dropout: float = 0.0
    targets: tuple[str, ...] = (
        "q_proj_moe_gen",
        "k_proj_moe_gen",
        "v_proj_moe_gen",
        "o_proj_moe_gen",
        "mlp_moe_gen.gate_proj",
        "mlp_moe_gen.up_proj",
        "mlp_moe_gen.down_proj",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`model`: what is trained.

    `path` is a folder of safetensors in the public layout; None takes the weights shipped with the package for `bagel-digits`.
    `train`: `lora` or `full`. `batch_invariant`: a row's bits do not depend on its batch (None: as the preset says).
    """

    preset: str = "bagel-digits"
    path: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    train: Literal["lora", "full"] = "lora"
    lora: LoraConfig = field(default_factory=LoraConfig)
    gradient_checkpointing: bool = False
    batch_invariant: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """`sampling`: how rows are denoised while training. `height`, `width` (pixels): default canvas and storage bound."""

    height: int = 8
    width: int = 8
    num_inference_steps: int = 14
    shift: float | None = None
    eta: float = 1.0
    rule: Literal["flow", "cps", "dance"] = "flow"
    guidance_scale: float = 1.0
    cfg_img_scale: float = 1.0
    cfg_interval: tuple[float, float] = (0.0, 1.0)
    cfg_renorm_type: Literal["global", "channel", "text_channel"] = "global"
    cfg_renorm_min: float = 0.0
    trajectory_dtype: Literal["float32", "bfloat16"] = "float32"
    storage: Literal["ragged", "padded"] = "ragged"
    init_same_noise: bool = False
    sde: StepSet = field(default_factory=StepSet)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """`algorithm`: FlowGRPO (arXiv 2505.05470). `beta` weighs the KL to the reference (adapter disabled)."""

    name: Literal["flow_grpo"] = "flow_grpo"
    clip_range: float = 1e-4
    beta: float = 0.0
    adv_clip: float | None = 5.0
    adv_use_global_std: bool = False
    advantage_scope: Literal["group", "batch"] = "group"
    drop_zero_variance_groups: bool = False
    shuffle_advantages: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """`optim.ema`: an average of the trained weights, for the evaluations that push first and the export. decay 0: off."""

    decay: float = 0.0
    warmup: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """`optim`: AdamW. `warmup_steps`: optimizer steps of linear warm-up from 0."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig:
    """`stack`: replay and update. `num_updates_per_batch`: disjoint mini-batches of the rollout's rows, by group."""

    micro_batch_size: int = 8
    num_updates_per_batch: int = 1
    first_update_ratio_tol: float | None = None
    first_update_ratio_action: Literal["warn", "raise"] = "warn"
    parallel: Literal["ddp"] = "ddp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardStackConfig:
    """`reward_stack`: the micro loop of generate + score on a rollout rank, and which rank runs which rows.

    `schedule` None: contiguous shares. `cost`: coefficients of the cost model, a file of them, or None: token count.
    """

    micro_batch_size: int = 64
    overlap: bool = False
    schedule: Literal["owner", "ring", "steal"] | None = None
    cost: dict[str, float] | str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorerConfig:
    """One entry of `reward.scorers`. `weight` 0 makes it a monitor: logged, never trained on."""

    name: str
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """`reward`: scorers and how they are combined. `normalise: group` standardises each reward within its group first.

    `dispatch`: a row is scored by the rank that generated it (`generator`), or all rows are dealt out equally (`balanced`).
    """

    scorers: tuple[ScorerConfig, ...] = ()
    normalise: Literal["none", "group"] = "none"
    on_error: Literal["drop", "raise"] = "drop"
    dispatch: Literal["generator", "balanced"] = "generator"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """`data.train`, `data.eval`: a named built-in set, or the path of a .txt (a prompt a line) or .jsonl file."""

    name: str | None = None
    path: str | None = None
    shuffle: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`data`: the prompts that are trained and evaluated on. `eval` may name several sets; the first one is `eval/reward`."""

    train: DatasetConfig = field(default_factory=DatasetConfig)
    eval: dict[str, DatasetConfig] = field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """`eval`: fixed seeds. `scorers` add monitors to those of `reward`, `set_metrics` numbers about all images together."""

    samples_per_prompt: int = 4
    num_prompts: int | None = None
    seed: int = 1234
    eta: float = 0.0
    scorers: tuple[ScorerConfig, ...] = ()
    set_metrics: tuple[str, ...] = ()
    micro_batch_size: int = 64
    grid_rows: int = 10
    grid_columns: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """`parity`: what is compared between rollout and replay.

    `bitwise`: replaying a row under its own weights gives its log-probs' very bits, whatever its batch, and nothing else is
    tolerated (None: where the model, its dtype and the device can do it). `probe_rows`: lagging rows that a training rank replays
    a rollout, without gradients, under the weights that generated them. `store_interval`: rollouts between those that are stored
    for `unirl parity`; 0: none.
    """

    require_fingerprint: bool = True
    bitwise: bool | None = None
    probe_rows: int = 4
    store_interval: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """`logging`: `metrics.jsonl` is always written."""

    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "unirl"
    console: Literal["auto", "rich", "plain"] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`checkpoint`: how they are written, beside the running step or (`background: false`) before the next one.

    `on_error`: what a write that fails (a full disk, a read-only or vanished folder) does to the run.
    """

    keep_last: int = 3
    background: bool = True
    on_error: Literal["continue", "stop"] = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole recipe. See `docs/configuration.md` for every key."""

    run_dir: str = "runs/default"
    seed: int = 0
    num_rollouts: int = 30
    batch_size: int = 10
    samples_per_prompt: int = 12
    eval_interval: int = 0
    save_interval: int = 0
    resume: str | None = None
    dry_run: bool = False

    num_devices: int = 1
    num_nodes: int = 1
    train_fraction: float = 0.5
    threads_per_worker: int = 1
    pin_workers: bool = False
    ray_address: str | None = None
    max_worker_restarts: int = 0
    worker_timeout_s: float = 1800.0
    allow_code: bool = False

    layout: Literal["colocate", "separate"] = "colocate"
    max_inflight: int = 1
    reap_before_launch: bool = True
    weight_sync_interval: int = 1
    buffer_max_staleness: int = 0
    buffer_order: Literal["oldest", "freshest"] = "oldest"
    deterministic: bool = False
    transport_kind: Literal["object_store", "colocate_store"] = "object_store"
    old_logp_source: Literal["rollout", "replay"] = "rollout"

    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    stack: StackConfig = field(default_factory=StackConfig)
    reward_stack: RewardStackConfig = field(default_factory=RewardStackConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def slab_sizes(self) -> tuple[int, int]:
        """(train ranks, rollout ranks). Colocated ranks do both."""
        if self.layout == "colocate":
            return self.num_devices, self.num_devices
        train = round(self.num_devices * self.train_fraction)
        if not 1 <= train <= self.num_devices - 1:
            raise ValueError(
                f"train_fraction {self.train_fraction} of num_devices {self.num_devices} gives {train} training devices; "
                f"allowed: 1 to {self.num_devices - 1}; change train_fraction or num_devices"
            )
        return train, self.num_devices - train

    def may_lag(self, asynchronous: bool) -> bool:
        """Whether a trained row can come from older weights than the current ones at the start of its training step."""
        return self.weight_sync_interval > 1 or (asynchronous and self.buffer_max_staleness > 0)
