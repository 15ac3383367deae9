"""The same figures once more under the names of vLLM's metrics, for autoscalers and dashboards that read
those. Opt-in (`--metrics-alias vllm`): each is a series more to store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Alias:
    """One metric of theirs: our name (without `_total`) and how labels are renamed. Labels that are not named
    are summed over.
    """

    name: str
    labels: dict[str, str] = field(default_factory=dict)


VLLM: tuple[tuple[str, Alias], ...] = (
    ("dtp_num_requests_running", Alias("vllm:num_requests_running")),
    ("dtp_num_requests_waiting", Alias("vllm:num_requests_waiting")),
    ("dtp_kv_cache_usage_ratio", Alias("vllm:kv_cache_usage_perc")),
    ("dtp_kv_cache_usage_ratio", Alias("vllm:gpu_cache_usage_perc")),
    ("dtp_preemptions", Alias("vllm:num_preemptions")),
    ("dtp_prompt_tokens", Alias("vllm:prompt_tokens")),
    ("dtp_generation_tokens", Alias("vllm:generation_tokens")),
    ("dtp_prefix_cache_queries", Alias("vllm:prefix_cache_queries")),
    ("dtp_prefix_cache_hits", Alias("vllm:prefix_cache_hits")),
    ("dtp_request_success", Alias("vllm:request_success", {"finish_reason": "finished_reason"})),
    ("dtp_time_to_first_token_seconds", Alias("vllm:time_to_first_token_seconds")),
    ("dtp_inter_token_latency_seconds", Alias("vllm:inter_token_latency_seconds")),
    ("dtp_time_per_output_token_seconds", Alias("vllm:request_time_per_output_token_seconds")),
    ("dtp_e2e_request_latency_seconds", Alias("vllm:e2e_request_latency_seconds")),
    ("dtp_request_queue_time_seconds", Alias("vllm:request_queue_time_seconds")),
    ("dtp_request_prompt_tokens", Alias("vllm:request_prompt_tokens")),
    ("dtp_request_generation_tokens", Alias("vllm:request_generation_tokens")),
)
"""Ours → theirs. `*_perc` is a share from 0 to 1 there too."""


def vllm_aliases(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """The families of theirs that ours stand for, labelled with the model's name as theirs are."""
    ours = {family.name: family for family in families}
    for name, alias in VLLM:
        source = ours.get(name)
        if source is not None:
            yield _renamed(source, alias, model)


def _renamed(source: Metric, alias: Alias, model: str) -> Metric:
    text = f"As {source.name}. {source.documentation}"
    family = Metric(alias.name, text, source.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in source.samples:
        labels = {"model_name": model}
        labels |= {alias.labels[key]: value for key, value in sample.labels.items() if key in alias.labels}
        if "le" in sample.labels:
            labels["le"] = sample.labels["le"]
        key = (sample.name.removeprefix(source.name), tuple(labels.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    for (suffix, pairs), value in sums.items():
        family.samples.append(Sample(alias.name + suffix, dict(pairs), value))
    return family
