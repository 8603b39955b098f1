"""How words are picked, as flags: what chat, server and page take when nobody says otherwise."""

import dataclasses

from trainer.config import flag


@dataclasses.dataclass
class SamplingArguments:
    """How words are picked."""

    _argument_group_name = "sampling"

    temperature: float = flag(0.5, "0: always the likeliest word; higher: more varied")
    top_p: float = flag(0.9, "pick among the likeliest words that together have this probability")
    top_k: int = flag(0, "pick among this many likeliest words; 0: no such limit")
    max_new_tokens: int = flag(512, "longest answer")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        found = []
        if not self.temperature >= 0:
            found.append(f"--temperature {self.temperature} must not be negative; 0 picks the likeliest word")
        if not 0 < self.top_p <= 1:
            found.append(f"--top_p {self.top_p} must lie above 0 and up to 1; 1 is no limit")
        if self.top_k < 0:
            found.append(f"--top_k {self.top_k} must not be negative; 0 is no limit")
        if self.max_new_tokens < 1:
            found.append(f"--max_new_tokens {self.max_new_tokens} must be at least 1")
        return found

    def to_request(self) -> dict[str, float]:
        """The same as fields of a request to a server."""
        fields = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_new_tokens}
        return fields | ({"top_k": self.top_k} if self.top_k else {})
