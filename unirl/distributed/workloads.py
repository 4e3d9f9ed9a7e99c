# SPDX-License-Identifier: Apache-2.0
"""What rows will cost, known on the driver before anything runs: workloads from prompts, canvases and source images."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

from unirl.config import RunConfig
from unirl.distributed.models import model_config, weights_folder
from unirl.models.bagel.guidance import Guidance
from unirl.models.bagel.layout import plan_layout
from unirl.models.bagel.source import source_sizes
from unirl.models.bagel.tokenizer import Tokenizer, load_tokenizer
from unirl.rollout.engine.trainside import TrainsideEngine
from unirl.schedule.cost import CostModel, cost_from_config
from unirl.schedule.plan import RolloutPlan
from unirl.schedule.policies import policy_for
from unirl.schedule.units import Group, Workload, contiguous_owners
from unirl.sde import shifted_sigmas
from unirl.types import Part, Sample, SamplingParams


class RowCosts:
    """Plans rollouts and weighs training rows by `reward_stack.schedule` and `reward_stack.cost`.

    Constructing it checks both keys: raises `ValueError` for a file that cannot be read or coefficients that are wrong, and
    for `steal` with an engine whose noise is not keyed by row.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._model = model_config(config)
        self.cost = cost_from_config(config.reward_stack.cost)
        if config.reward_stack.schedule is not None:
            engine = TrainsideEngine
            policy_for(
                config.reward_stack.schedule,
                engine=engine.name,
                noise_keyed_by_row=engine.noise_keyed_by_row,
            )
        self._known: dict[Hashable, Workload] = {}

    def check_source_images(self) -> None:
        """Raises `ValueError` when `reward_stack.cost` cannot weigh rows with source images."""
        self.cost.affine(Workload(tokens=1, source_tokens=1))

    def workloads(self, rows: Part) -> list[Workload]:
        """One a row, of its generation."""
        params = rows.params
        assert params is not None, "rows are planned by their sampling params"
        images = rows.images or (None,) * len(rows)
        found = []
        for row, (prompt, canvas, image) in enumerate(
            zip(rows.prompts, rows.canvases(), images, strict=True)
        ):
            size = None if image is None else (int(image.shape[0]), int(image.shape[1]))
            key = (prompt, canvas, size, params)
            if key not in self._known:
                self._known[key] = self._workload(params, prompt, canvas, size, rows.ids[row])
            found.append(self._known[key])
        return found

    def plan(self, request: Sample, num_ranks: int) -> RolloutPlan:
        """The plan of a rollout: owners are those of the contiguous split, so that schedules differ in who helps whom alone."""
        rows = request.frontier
        members: dict[str, list[int]] = {}
        for row, group_id in enumerate(rows.group_ids):
            members.setdefault(group_id, []).append(row)
        workloads = self.workloads(rows)
        owners = contiguous_owners(len(members), num_ranks)
        groups = tuple(
            Group(group_id, tuple(rows.ids[row] for row in of_group), workloads[of_group[0]], owner)
            for (group_id, of_group), owner in zip(members.items(), owners, strict=True)
        )
        schedule = self._config.reward_stack.schedule
        assert schedule is not None, "a rollout without a schedule is not planned"
        return RolloutPlan(
            groups,
            num_ranks,
            schedule,
            self.cost,
            max_rows=self._config.reward_stack.micro_batch_size,
            min_rows=TrainsideEngine.min_pack_rows,
            packs_groups=TrainsideEngine.packs_groups,
        )

    def training(self, rows: Part) -> list[float]:
        """What replaying each row costs, in any unit: its share of a full micro-batch of the trained steps."""
        trained = 1 if rows.sde_steps is None else max(1, int(rows.sde_steps.shape[1]))
        size = self._config.stack.micro_batch_size
        costs = []
        for workload in self.workloads(rows):
            replayed = Workload(
                workload.tokens, trained, workload.branches, workload.prefix_tokens, workload.source_tokens
            )
            per_row, per_call = self.cost.affine(replayed)
            costs.append(per_row + per_call / size)
        return costs

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._model, weights_folder(self._config))

    def _workload(
        self,
        params: SamplingParams,
        prompt: str,
        canvas: tuple[int, int],
        source: tuple[int, int] | None,
        row_id: str,
    ) -> Workload:
        guidance = Guidance.of(params)
        stride = self._model.pixel_stride
        tokens = canvas[0] // stride * (canvas[1] // stride)
        branches = len(guidance.contexts)
        shift = self._model.shift if params.shift is None else params.shift
        times = shifted_sigmas(params.num_inference_steps, shift)[:-1]
        lo, hi = guidance.interval
        guided = int(((times > lo) & (times <= hi)).sum()) if branches > 1 else 0
        steps = params.num_inference_steps
        if branches > 1 and guided < steps:
            # Unguided steps run one branch: count passes, and call each a step.
            steps, branches = steps + guided * (branches - 1), 1
        if not isinstance(self.cost, CostModel):
            return Workload(tokens, steps, branches)
        sizes = None if source is None else source_sizes(self._model, source)
        layout = plan_layout(self._model, self._tokenizer.encode(prompt), canvas, sizes, row=row_id)
        prefixes = [layout.context(name).kv_len for name in guidance.contexts]
        images = [block.grid[0] * block.grid[1] for block in layout.gen.blocks if block.grid is not None]
        return Workload(tokens, steps, branches, round(sum(prefixes) / len(prefixes)), sum(images))
