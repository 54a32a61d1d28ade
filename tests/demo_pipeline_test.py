"""The demo's scripts from source text to a Hugging Face directory, at tiny size."""

import json
import lzma
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from absl.testing import absltest

from moejax.models.hf.config import read_model_config
from moejax.models.transformer import forward, merge_weights, model_definition
from tests.hf_checkpoints import load_leaves
from tests.script_runs import ROOT, run_file

ARTICLE = (
    " \n = {title} = \n \n {title} wrote a <unk> about rivers in Ruritania . \n It was <unk> . \n"
    " \n = = Life = = \n \n {title} lived by the sea @-@ side . \n"
)
PROSE = "The zealous Quibbleworth walked along the river. He met Prunella, who was yachting.\n"
OVERRIDES = {
    "batch_size": 2,
    "context": 16,
    "total_steps": 4,
    "validate_every": 4,
    "log_every": 2,
    "validation_tokens": 64,
    "dtype": "float32",
    "model.vocab_size": 300,
    "model.model_dim": 16,
    "model.num_layers": 2,
    "model.moe_layers": "(0, 1)",
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 8,
    "model.num_experts": 4,
    "model.experts_per_token": 2,
    "model.expert_dim": 8,
    "optimizer.warmup_steps": 1,
}


def write_source(directory: Path) -> None:
    """The layout that `prepare_data` reads, a few kilobytes of it."""

    def write(name: str, text: str) -> None:
        path = directory / f"{name}.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(text.encode()))

    for domain in ("books", "textbooks", "code", "math", "chinese"):
        for split, count in (("train", 12), ("valid", 2)):
            rows = [{"source": "test", "text": f"{split} {i}\n" + PROSE * 3} for i in range(count)]
            if split == "train":
                rows.append({"source": "test", "text": "A long line. " * 10})
            elif domain == "code":
                rows.append({"source": "test", "text": "x\n" + "A long line. " * 10 + "\ny"})
            write(f"{split}/{domain}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write("train/wikitext2.train.tokens", "".join(ARTICLE.format(title=t) for t in ["Ann", "Bob"]))
    for split in ("valid", "test"):
        write(f"eval/wikitext2.{split}.raw", ARTICLE.format(title="Cyd").replace("<unk>", "book"))
    problem = {"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"}
    write("eval/gsm8k.train.jsonl", (json.dumps(problem) + "\n") * 12)


def run_script(name: str, *arguments: str) -> None:
    done = run_file(
        ROOT / "scripts/demo_training" / f"{name}.py", *arguments, cwd=ROOT, JAX_PLATFORMS="cpu"
    )
    if done.returncode:
        raise AssertionError(f"{name} failed:\n{done.stderr[-4000:]}")


class PipelineTest(absltest.TestCase):
    @pytest.mark.slow
    def test_from_text_to_a_directory_that_transformers_loads(self):
        work = Path(self.enterContext(tempfile.TemporaryDirectory()))
        write_source(work / "text")
        data, run, out = str(work / "data"), str(work / "run"), work / "demo"
        run_script("prepare_data", f"--data={work}/text", f"--output={data}", "--vocab_size=300")
        dropped = json.loads((work / "data/corpus.json").read_text())["dropped_documents"]
        self.assertEqual(dropped["books"], 1)

        config = ["--config=configs/train_demo.py", f"--data={data}"]
        config += [f"--config.{name}={value}" for name, value in OVERRIDES.items()]
        run_script("train", *config, f"--run_dir={run}")
        run_script(
            "evaluate",
            *config,
            f"--weights={run}/weights.safetensors",
            f"--output={run}/evaluation.json",
            "--stride=8",
        )
        run_script("export", f"--data={data}", f"--run_dir={run}", f"--output={out}")

        self.assertGreater((out / "loss.png").stat().st_size, 1000)

        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "2+2?"}], add_generation_prompt=True, tokenize=False
        )
        self.assertEqual(text, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
        ids = tokenizer(text + PROSE)["input_ids"]
        self.assertEqual(tokenizer.decode(ids), text + PROSE)
        self.assertEqual(theirs.generation_config.eos_token_id, [2, 0])
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits.numpy()

        model_config = read_model_config(out)
        weights = load_leaves(out)
        model = merge_weights(model_definition(model_config), weights)
        hidden, _ = forward(model, jnp.asarray([ids], jnp.int32))
        found = np.asarray(model.project_to_vocab(hidden))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
