# SPDX-License-Identifier: Apache-2.0
"""A run's requests, each a function of its number: nothing depends on when, where or how often it is asked for."""

from __future__ import annotations

from unirl.config import RunConfig
from unirl.data import PromptSampler, build_eval_request, build_request, load_dataset
from unirl.types import STREAM_EVAL, NoiseRecipe, Sample, SamplingParams, check_canvases


class Requests:
    """Training request number i, and the evaluation requests.

    Raises `ValueError` with file and line for a bad dataset row, before anything is started.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.dataset = load_dataset(config.data.train, "data.train")
        self.eval_sets = {name: load_dataset(c, f"data.eval.{name}") for name, c in config.data.eval.items()}
        self._sampler = PromptSampler(
            len(self.dataset), config.batch_size, config.seed, shuffle=config.data.train.shuffle
        )

    def training(self, index: int) -> Sample:
        """Request `index`: `batch_size` prompts with `samples_per_prompt` siblings each, and their trained steps."""
        config = self._config
        params = self._params(NoiseRecipe(config.seed, init_same_noise=config.sampling.init_same_noise))
        request = build_request(
            self.dataset, self._sampler.batch(index), index, config.samples_per_prompt, params
        )
        steps = config.sampling.sde.for_rows(
            request.frontier.ids,
            seed=config.seed,
            iteration=index,
            num_inference_steps=params.num_inference_steps,
            rule=params.rule,
        )
        return request.replace_frontier(request.frontier.replace(sde_steps=steps))

    def evaluation(self, name: str) -> Sample:
        """The whole evaluation set `name`, always under the same ids and so the same noise."""
        config, dataset = self._config, self.eval_sets[name]
        params = self._params(NoiseRecipe(config.eval.seed, stream=STREAM_EVAL), eta=config.eval.eta)
        count = min(len(dataset), config.eval.num_prompts or len(dataset))
        return build_eval_request(dataset, range(count), config.eval.samples_per_prompt, params)

    def check_canvases(self, *, pixel_stride: int, max_side: int) -> None:
        """Refuses, by dataset and row, a canvas that the model or the storage bound cannot hold."""
        bound = self._params(NoiseRecipe(0)).canvas
        check_canvases(
            ["default"],
            [bound],
            bound,
            pixel_stride=pixel_stride,
            max_side=max_side,
            key="sampling.height/width",
        )
        for dataset in (self.dataset, *self.eval_sets.values()):
            # Of the texts alone: all source images at once need not fit into memory.
            texts = dataset.without_images()
            rows = build_eval_request(texts, range(len(texts)), 1, self._params(NoiseRecipe(0))).parts[0]
            names = [f"{dataset.name}, row {i + 1}" for i in range(len(rows))]
            check_canvases(names, rows.canvases(), bound, pixel_stride=pixel_stride, max_side=max_side)

    def _params(self, noise: NoiseRecipe, *, eta: float | None = None) -> SamplingParams:
        sampling = self._config.sampling
        return SamplingParams(
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            eta=sampling.eta if eta is None else eta,
            rule=sampling.rule,
            noise=noise,
            guidance_scale=sampling.guidance_scale,
            cfg_img_scale=sampling.cfg_img_scale,
            cfg_interval=sampling.cfg_interval,
            cfg_renorm_type=sampling.cfg_renorm_type,
            cfg_renorm_min=sampling.cfg_renorm_min,
            shift=sampling.shift,
            trajectory_dtype=sampling.trajectory_dtype,
            storage=sampling.storage,
        )
