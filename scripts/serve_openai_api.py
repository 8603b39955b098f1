"""Serve a model to every client of OpenAI's API: chat and completions, streaming, tools, reasoning.

Examples:
    python scripts/serve_openai_api.py
    python scripts/serve_openai_api.py --model_path out/full_sft_256 --quantize f32 --port 9000
    python scripts/serve_openai_api.py --host 0.0.0.0 --api_key secret
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import ipaddress
import os
import secrets
import socket

from transformers.utils import logging

from scripts.serving.sampling import SamplingArguments
from scripts.serving.service import EngineArguments, leave_on_sigterm, running_service
from trainer.config import FolderChoice, flag, parse_arguments, raise_problems, user_errors
from trainer.weights import find_model


@dataclasses.dataclass
class ServerArguments:
    """Where it listens, who may ask, and how much."""

    _argument_group_name = "server"

    host: str = flag("127.0.0.1", "address to listen on; any other than the loopback wants a key")
    port: int = flag(8000, "port to listen on; 0: any that is free")
    api_key: str | None = flag(
        None,
        "what clients send as key; by default MINIMIND_API_KEY, else none on the loopback and a new one elsewhere",
    )
    max_request_bytes: int = flag(2**20, "longest body of a request; longer ones get 413")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        found = [] if 0 <= self.port < 65536 else [f"--port {self.port} must lie in 0 to 65535"]
        if self.max_request_bytes < 1:
            found.append(f"--max_request_bytes {self.max_request_bytes} must be above 0")
        return found

    def key(self) -> str | None:
        """The key that clients must send; a new one where everybody could reach an open door."""
        given = self.api_key or os.environ.get("MINIMIND_API_KEY")
        return given or (None if is_loopback(self.host) else secrets.token_urlsafe(24))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        ValueError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)  # from now on clients wait instead of being refused
    except OSError as error:
        listening.close()
        raise ValueError(f"--host {host} --port {port}: cannot listen there ({error.strerror or error})") from error
    return listening


def main() -> None:
    """Entry point."""
    logging.disable_progress_bar()
    groups = (FolderChoice, EngineArguments, SamplingArguments, ServerArguments)
    choice, engine, sampling, server = parse_arguments(*groups, description=__doc__.split("\n")[0])
    raise_problems([*engine.problems(), *sampling.problems(), *server.problems()])
    try:
        import uvicorn

        from scripts.serving.front import build_front
    except ModuleNotFoundError as error:
        raise ValueError(f"serving needs the package {error.name}: pip install -r requirements-serve.txt") from error
    leave_on_sigterm()
    path, key = find_model(choice), server.key()
    with listen(server.host, server.port) as listening:
        with running_service(path, engine, sampling.to_request(), key, server.max_request_bytes) as service:
            host = f"[{server.host}]" if ":" in server.host else server.host
            url = f"http://{host}:{listening.getsockname()[1]}/v1"
            options = service.options
            print(
                f"{options.name} by {service.engine.kind} on {url}: {options.slots} answers at a time, "
                f"{options.context:,} tokens each" + ("" if key is None else f"\nAPI key: {key}"),
                flush=True,
            )
            config = uvicorn.Config(
                build_front(service.engine, options), log_level="warning", timeout_graceful_shutdown=5
            )
            uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    with user_errors():
        main()
