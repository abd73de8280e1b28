"""Text from our decoder: greedy is transformers' on the export, draws follow their probabilities, ends are ends."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from checkpoint.export_hf import ExportOptions, export
from checkpoint.import_hf import write_import
from checkpoint.reference import TEXT
from checkpoint.saved_run import SavedRun, model_config, open_saved_run
from checkpoint.state import TrainState
from checkpoint.store import save_weights
from evaluation.generate import Sampling, generate, load_decoder, main
from model.decoder import Decoder

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0, max_new_tokens=48)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "checkpoint" / "make_exports.py"
    spec = importlib.util.spec_from_file_location("make_exports", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def olmoe(tmp_path, tiny) -> SavedRun:
    return open_saved_run(tiny.write_run(tmp_path / "olmoe", tiny.OLMOE))


def continued(run: SavedRun, prompt_BS: torch.Tensor, sampling: Sampling = GREEDY, **changes) -> torch.Tensor:
    tokens = {"vocab_size": run.tokenizer.vocab_size, "eos_id": run.tokenizer.eos_id} | changes
    return generate(load_decoder(run, CPU), prompt_BS, sampling=sampling, **tokens)


def prompts_of(run: SavedRun, *, sequences: int, positions: int) -> torch.Tensor:
    return torch.tensor(run.tokenizer.encode(TEXT)[: sequences * positions]).view(sequences, positions)


def assert_greedy_is_that_of_transformers(run: SavedRun, folder: Path) -> torch.Tensor:
    export(run.path, folder, options=ExportOptions(compare_logits=False, serve=()))
    theirs_model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt_BS = prompts_of(run, sequences=4, positions=12)
    ours = continued(run, prompt_BS)
    theirs = theirs_model.generate(
        prompt_BS, attention_mask=torch.ones_like(prompt_BS), max_new_tokens=48, do_sample=False
    )[:, 12:]
    assert ours.tolist() == theirs.tolist()
    assert len(ours.unique()) > 10, "a model that repeats one token would agree too easily"
    return ours


@pytest.mark.parametrize("name", ["olmoe", "olmoe_all", "qwen3_moe", "qwen3_moe_all"])
def test_greedy_text_of_a_random_model_is_that_of_transformers(tmp_path, tiny, name):
    base, changes, _ = tiny.EXPORTS[name]
    run = open_saved_run(tiny.write_run(tmp_path / "run", tiny.changed(base, changes), seed=5))
    assert_greedy_is_that_of_transformers(run, tmp_path / "out")


def trained_weights(run: SavedRun, steps: int) -> dict[str, torch.Tensor]:
    decoder = load_decoder(run, CPU)
    decoder.init_weights(0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    ids = torch.tensor(run.tokenizer.encode(TEXT))
    rows_BS = ids[: len(ids) // 33 * 33].view(-1, 33)
    for _ in range(steps):
        optimizer.zero_grad()
        (decoder(rows_BS[:, :-1], rows_BS[:, 1:]).ce_sum / rows_BS[:, 1:].numel()).backward()
        optimizer.step()
    return dict(decoder.state_dict())


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_greedy_text_of_a_trained_model_is_that_of_transformers(tmp_path, tiny, family):
    path = tiny.write_run(tmp_path / "run", tiny.EXPORTS[family][0])
    state = TrainState(step=40, tokens=40_000, samples=40, wandb_id=None)
    save_weights(path / "checkpoints", weights=trained_weights(open_saved_run(path), 40), state=state, config={})
    ours = assert_greedy_is_that_of_transformers(open_saved_run(path, step=40), tmp_path / "out")
    untrained = continued(open_saved_run(path, step=7), prompts_of(open_saved_run(path), sequences=4, positions=12))
    assert ours.tolist() != untrained.tolist()


def test_generation_never_draws_rows_that_pad_the_vocabulary(olmoe):
    assert olmoe.config.vocab_size > olmoe.tokenizer.vocab_size
    prompt_BS = prompts_of(olmoe, sequences=8, positions=4)
    hot = Sampling(temperature=100.0, top_p=1.0, max_new_tokens=50)
    ids = continued(olmoe, prompt_BS, hot)
    assert ids.max() < olmoe.tokenizer.vocab_size
    assert continued(olmoe, prompt_BS, hot, vocab_size=olmoe.config.vocab_size).max() >= olmoe.tokenizer.vocab_size


def naive_nucleus(prob_V: torch.Tensor, top_p: float) -> set[int]:
    chosen: set[int] = set()
    while sum(prob_V[token].item() for token in chosen) < top_p:
        chosen.add(max((t for t in range(len(prob_V)) if t not in chosen), key=lambda token: prob_V[token].item()))
    return chosen


def test_draws_come_from_the_nucleus_as_often_as_their_probabilities_say(olmoe):
    temperature, top_p, draws = 1.5, 0.6, 4000
    prompt_BS = prompts_of(olmoe, sequences=1, positions=5)
    with torch.no_grad():
        logits_V = load_decoder(olmoe, CPU)(prompt_BS).logits_BSV[0, -1, : olmoe.tokenizer.vocab_size]
    prob_V = F.softmax(logits_V / temperature, dim=-1)
    nucleus = naive_nucleus(prob_V, top_p)
    assert 1 < len(nucleus) < olmoe.tokenizer.vocab_size / 2
    sampling = Sampling(temperature=temperature, top_p=top_p, max_new_tokens=1)
    drawn = continued(olmoe, prompt_BS.expand(draws, -1), sampling)[:, 0]
    count_V = torch.bincount(drawn, minlength=olmoe.tokenizer.vocab_size)
    assert set(count_V.nonzero()[:, 0].tolist()) <= nucleus
    mass = sum(prob_V[token].item() for token in nucleus)
    for token in nucleus:
        expected = prob_V[token].item() / mass
        # Five standard deviations of a binomial count.
        assert abs(count_V[token].item() - draws * expected) <= 5 * (draws * expected * (1 - expected)) ** 0.5


def test_the_seed_decides_a_draw_but_not_the_greedy_text(olmoe):
    prompt_BS = prompts_of(olmoe, sequences=2, positions=6)
    for temperature, depends in ((1.0, True), (0.0, False)):
        first, again, other = (
            continued(olmoe, prompt_BS, Sampling(temperature=temperature, max_new_tokens=20, seed=seed)).tolist()
            for seed in (1, 1, 2)
        )
        assert first == again
        assert (first != other) == depends


def test_a_text_ends_at_its_end_token_and_the_others_go_on(olmoe):
    prompt_BS = prompts_of(olmoe, sequences=2, positions=6)
    free = continued(olmoe, prompt_BS, eos_id=-1)
    eos_id = next(token for token in free[0].tolist() if token not in free[1].tolist())
    end = free[0].tolist().index(eos_id)
    ended = continued(olmoe, prompt_BS, eos_id=eos_id)
    assert ended[0].tolist() == free[0, : end + 1].tolist() + [eos_id] * (free.shape[1] - end - 1)
    assert ended[1].tolist() == free[1].tolist()
    alone = continued(olmoe, prompt_BS[:1], eos_id=eos_id)
    assert alone[0].tolist() == free[0, : end + 1].tolist()


def test_a_text_ends_at_the_last_position(olmoe):
    assert olmoe.config.max_positions == 64
    assert continued(olmoe, prompts_of(olmoe, sequences=1, positions=40), eos_id=-1).shape == (1, 24)
    for positions in (0, 64):
        with pytest.raises(ValueError, match=rf"the prompt has {positions} tokens, needed 1 to 63"):
            continued(olmoe, prompts_of(olmoe, sequences=1, positions=positions))


def test_every_new_token_costs_one_position(olmoe, monkeypatch):
    seen, forward = [], Decoder.forward

    def counted(self, input_ids_BS, *args, **kwargs):
        seen.append(input_ids_BS.shape[1])
        return forward(self, input_ids_BS, *args, **kwargs)

    monkeypatch.setattr(Decoder, "forward", counted)
    continued(olmoe, prompts_of(olmoe, sequences=1, positions=9), Sampling(temperature=0, max_new_tokens=5))
    assert seen == [9, 1, 1, 1, 1]


def test_the_command_prints_prompt_and_continuation_of_the_step_that_was_asked_for(olmoe, tiny, capsys):
    weights = {name: tensor.flip(0) for name, tensor in tiny.weights_of(olmoe.path).items()}
    save_weights(
        olmoe.path / "checkpoints",
        weights=weights,
        state=TrainState(step=9, tokens=9000, samples=9, wandb_id=None),
        config={},
    )
    texts = []
    for step in ([], ["--step", "7"], ["--step", "9"]):
        arguments = [str(olmoe.path), "--prompt", "The mill", "--max-new-tokens", "8", "--temperature", "0", *step]
        assert main(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("The mill") and len(text) > len("The mill\n") for text in texts)
    assert texts[0] == texts[2] != texts[1]


def test_what_cannot_be_generated_is_refused_in_one_line(olmoe, tmp_path, capsys):
    for wrong in (
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"max_new_tokens": 0},
        {"seed": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)
    for arguments, message in (
        ([str(tmp_path / "absent"), "--prompt", "x"], "is not a run"),
        ([str(olmoe.path), "--prompt", "x", "--step", "99"], "no checkpoint"),
        ([str(olmoe.path), "--prompt", "x", "--top-p", "2"], "top_p=2.0"),
        ([str(olmoe.path), "--prompt", ""], "the prompt has 0 tokens"),
    ):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


def test_an_imported_folder_continues_a_prompt_like_the_run_it_came_from(olmoe, tmp_path):
    export(olmoe.path, tmp_path / "hf", options=ExportOptions(compare_logits=False))
    write_import(tmp_path / "hf", tmp_path / "imported")
    prompt_BS = prompts_of(olmoe, sequences=2, positions=6)
    assert continued(open_saved_run(tmp_path / "imported"), prompt_BS).tolist() == continued(olmoe, prompt_BS).tolist()


def test_weights_that_are_not_numbers_give_no_text(olmoe, tiny):
    weights = tiny.weights_of(olmoe.path)
    weights["norm.weight"][3] = float("nan")
    save_weights(olmoe.path / "checkpoints", weights=weights, state=olmoe.state, config={})
    with pytest.raises(ValueError, match="NaN or infinity"):
        continued(open_saved_run(olmoe.path), prompts_of(olmoe, sequences=1, positions=4))


def test_a_model_trained_with_another_routing_is_decoded_with_top_k(olmoe, tiny):
    values = tiny.changed(tiny.OLMOE, {"moe": {"routing": {"train": "expert_choice"}}})
    assert olmoe.config.moe.routing.train is not model_config(values).moe.routing.train
    twin = open_saved_run(tiny.write_run(olmoe.path.with_name("expert_choice"), values))
    prompt_BS = prompts_of(olmoe, sequences=2, positions=6)
    assert continued(twin, prompt_BS).tolist() == continued(olmoe, prompt_BS).tolist()
