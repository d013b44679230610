"""Run one exported directory in vLLM, in this process alone: `python vllm_worker.py DIR IDS OUT`.

IDS is a JSON list of token lists; OUT gets the log-probability of every token but the first, as
vLLM computes it. Run by the engine environment's Python: it imports nothing of swiftfp8.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    directory, ids_file, out_file = map(Path, sys.argv[1:4])
    from vllm import LLM, SamplingParams

    rows = json.loads(ids_file.read_text())
    engine = LLM(
        model=str(directory),
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        dtype="bfloat16",
        skip_tokenizer_init=True,
    )
    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    results = engine.generate([{"prompt_token_ids": row} for row in rows], wanted, use_tqdm=False)
    out = []
    for row, result in zip(rows, results, strict=True):
        said = result.prompt_logprobs
        out.append([said[n][row[n]].logprob for n in range(1, len(row))])
    out_file.write_text(json.dumps(out))


if __name__ == "__main__":
    main()
