"""What vLLM gives each token of some rows: its log-probability and those of the likeliest tokens.

`python read_back.py JOB OUT`, by the Python of an environment with vLLM. JOB is {"directory",
"rows" (token ids), "top"}; OUT, for each row and each token but the first, is
{"logp", "likeliest", "top": {token: logp}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

# So that several can run at a time.
ON_GPU = {"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 2**30}


def main() -> None:
    """Score the job's rows."""
    import torch
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    longest = max(map(len, job["rows"])) + 8
    engine = LLM(
        model=job["directory"], dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=longest, max_num_seqs=1, max_num_batched_tokens=longest,
        max_logprobs=job["top"],
        **(ON_GPU if torch.cuda.is_available() else {}),
    )  # fmt: skip
    wanted = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=job["top"], detokenize=False
    )
    answers = [
        read(engine.generate([{"prompt_token_ids": row}], wanted, use_tqdm=False)[0], row)
        for row in job["rows"]
    ]
    Path(sys.argv[2]).write_text(json.dumps(answers))


def read(result: Any, row: list[int]) -> list[dict[str, Any]]:
    """One row's tokens; the row itself is not repeated."""
    found = []
    for place in range(1, len(row)):
        given = result.prompt_logprobs[place]
        top = {token: entry.logprob for token, entry in given.items()}
        likeliest = next(token for token, entry in given.items() if entry.rank == 1)
        found.append({"logp": top[row[place]], "likeliest": likeliest, "top": top})
    return found


if __name__ == "__main__":
    main()
