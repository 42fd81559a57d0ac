"""Makes Ray Serve run replicas, as many as are needed."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cllm.cluster.ray.replica import EXTRA_SECONDS, LEASE_TIMEOUT, ReplicaProcess, Spec
from cllm.routing.autoscale import ReplicaLoad, ScalingLimits, ScalingState, scale

APP = "cllm"


class ScalingRule:
    """The policy that Ray Serve asks for the number of replicas."""

    def __init__(self, **limits: float) -> None:
        self._limits = msgspec.convert(limits, ScalingLimits, strict=False)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number and the state for the next call."""
        metrics = context.aggregated_metrics or {}
        ready = [
            ReplicaLoad(
                round(running),
                max(1, round(metrics["max_num_seqs"].get(replica, 1))),
                metrics["waiting_seconds"].get(replica, 0.0),
            )
            for replica, running in metrics.get("num_running", {}).items()
            if replica in context.running_replicas
        ]
        state = msgspec.convert(context.policy_state or {}, ScalingState)
        num_starting = max(0, context.target_num_replicas - len(ready))
        wanted, state = scale(ready, num_starting, self._limits, state, time.time())
        return wanted, msgspec.to_builtins(state)


def deploy(spec: Spec) -> None:
    """Make Ray Serve run the replicas of ``spec``, and wait until they are ready. Raises
    RuntimeError if they cannot be.

    Number and limits may change without restarts. Otherwise new replicas replace the old ones: a
    new one is ready before an old one drains, if there is room for it.
    """
    limits = {**spec.limits, "min_replicas": spec.least, "max_replicas": spec.most}
    # for a fixed number too: a replica tells its load only if it was started with this
    scaling = AutoscalingConfig(
        min_replicas=spec.least,
        max_replicas=spec.most,
        metrics_interval_s=1.0,
        look_back_period_s=2.0,
        upscale_delay_s=0.0,  # ScalingRule has its own delays
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function=ScalingRule, policy_kwargs=limits),
    )
    deployment = serve.deployment(
        name="engine",
        ray_actor_options={"num_cpus": 0, "num_gpus": spec.gpus},
        health_check_period_s=1.0,
        health_check_timeout_s=4 * LEASE_TIMEOUT,
        graceful_shutdown_timeout_s=spec.drain_timeout + EXTRA_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=3,
        rolling_update_percentage=0.34,
        max_surge_percent=100,
        autoscaling_config=scaling,
    )(ReplicaProcess)
    # what does not need another process is not part of the arguments
    fixed = msgspec.structs.replace(spec, least=1, most=1, limits={})
    # serve.run gives each deployment a random version, and another version replaces all replicas.
    # Neither a change of their number nor the return after a failed upgrade may do that. A public
    # way to keep the version is only in the REST API of the dashboard, which does not run.
    deployment = deployment.options(version=str(spec.generation), _internal=True)
    app = deployment.bind(msgspec.json.encode(fixed).decode())
    try:
        serve.run(app, name=APP, route_prefix=None)
    except RuntimeError as error:  # it does not always say why
        deployments = serve.status().applications[APP].deployments.values()
        texts = [str(error), *(one.message for one in deployments)]
        found = re.search(r"the replica ended: .*", "\n".join(texts))
        raise RuntimeError(found[0] if found else texts[0]) from error
