"""sapo_min: train a language model to search, with GRPO, and keep it from drifting with one line, SAPO.

SAPO here is Search Agent Policy Optimization (arXiv 2603.10069): GRPO plus a conditional token-level KL term.
It is not "Soft Adaptive Policy Optimization" (arXiv 2511.20347), which TRL, verl and ms-swift call sapo.

    python sapo_min.py                        a tiny Qwen2 learns to search a built-in world, on any machine
    python sapo_min.py --algo grpo            the same without the line, which is in chapter 8
    python sapo_min.py --resume RUN_FOLDER    go on with a run; with --ask "QUESTION" its agent answers

"eq." and "Table" are the paper's; "report N" is a fault that users of such trainers met, avoided there.
"""
import copy
import inspect
import math
import os
import random
import re
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import retriever as env
from retriever import Document, Example, TfidfRetriever, UserError, require


# ==== 1. Settings: a field's sentence is the help of its flag, and the limits named in it hold ==============
@dataclass
class Config:
    algo: str = "sapo"
    "The loss (sapo | grpo | dspo)."
    model: str = "tiny"
    "The policy: tiny (a small Qwen2 made from its config), or a model on the hub or in a folder."
    data: str = "world"
    "The questions: world (built in), hotpotqa (from the hub), or a .json, .jsonl or .parquet file."
    corpus: str = ""
    "The documents, a .json or .jsonl file; empty takes those that come with the questions."
    device: str = "auto"
    "Where to compute (auto | cpu | cuda)."
    steps: int = 120
    "Training steps, each one rollout and minibatches x epochs updates (at least 0)."
    questions_per_step: int = 16
    "Questions a step (at least 1)."
    group_size: int = 8
    "Episodes sampled for each question, G in eq. 3; one alone has no spread to learn from (at least 2)."
    minibatches: int = 8
    "Updates that one rollout is cut into; with 1 (and 1 epoch) SAPO is exactly GRPO (at least 1)."
    epochs: int = 1
    "Times that each rollout is gone over (at least 1)."
    micro_batch_size: int = 64
    "Episodes in one forward pass; lower it if memory runs out, the gradient stays the same (at least 1)."
    gradient_checkpointing: bool = False
    "Training remakes each layer's activations in its backward pass: a third more time, much less memory."
    lr: float = 2e-4
    "Learning rate of AdamW at the first step (above 0)."
    lr_end: float = 0.1
    "Share of lr left at the last step, on a straight line; 1 keeps it constant (at least 0)."
    clip_eps: float = 0.2
    "Clip width of the token ratio, eq. 3; DSPO keeps its own, 3e-4 (above 0)."
    tau: float = 1.0
    "SAPO acts on tokens whose ratio is below tau, eq. 10 (above 0)."
    gamma: float = 0.1
    "Weight of the SAPO term, eq. 9 (at least 0)."
    kl_coef: float = 0.0
    "Weight of the KL to the cold-started policy, k3 estimator; 0 leaves it out (at least 0)."
    dynamic_filter: bool = False
    "Sample on until every group has different rewards; always on with dspo."
    temperature: float = 1.0
    "Sampling temperature, and the temperature of every log-probability (above 0)."
    max_turns: int = 4
    "Searches allowed; one more turn follows, which must answer (at least 0)."
    top_k: int = 2
    "Documents that a search returns (at least 1)."
    max_new_tokens: int = 16
    "Tokens the model may write in a turn (at least 1)."
    max_obs_tokens: int = 96
    "Tokens a retrieval may take up, tags included; documents that do not fit are left out (at least 1)."
    max_length: int = 512
    "Tokens an episode may have (at least 2)."
    cold_start_steps: int = 400
    "Supervised steps on imperfect demonstrations before training (at least 0)."
    cold_start_batch_size: int = 32
    "Demonstrations a cold-start step (at least 1)."
    reward: str = "em"
    "The reward, exact match or token overlap (em | f1)."
    eval_every: int = 20
    "Steps between greedy evaluations on the test split; the first and last step have one (at least 1)."
    save_every: int = 1
    "Steps between checkpoints; what a stopped run did after its last one is done again (at least 1)."
    eval_size: int = 0
    "Test questions to evaluate on; 0 takes the whole split (at least 0)."
    seed: int = 0
    "Seed of everything random but the built-in world, which is always the same (at least 0)."
    out: str = ""
    "The run folder, new or empty; empty makes runs/<date-time>-<algo>-s<seed>."
    resume: str = ""
    "A run folder to go on with."

    @classmethod
    def preset(cls, name: str) -> "Config":
        """The settings called "tiny" or "qwen"; UserError for another name."""
        require(name in PRESETS, f"--preset {name!r}: choose from {', '.join(PRESETS)}.")
        return cls(**PRESETS[name])

    def check(self) -> None:
        """UserError for the first setting that breaks the limit in its sentence."""
        env.check_limits(asdict(self), SENTENCES)
        require(self.max_length > self.max_new_tokens, "--max_length: it must be above --max_new_tokens.")

SENTENCES = dict(re.findall(r'    (\w+): .*\n    "(.*)"\n', inspect.getsource(Config)))
PRESETS = {"tiny": {}, "qwen": {
    "model": "Qwen/Qwen2.5-0.5B-Instruct", "data": "hotpotqa", "reward": "f1", "steps": 300, "lr": 1e-6,
    "lr_end": 1.0, "kl_coef": 1e-3, "questions_per_step": 8, "minibatches": 4, "micro_batch_size": 4,
    "gradient_checkpointing": True, "max_turns": 5, "top_k": 3, "max_new_tokens": 128, "max_obs_tokens": 512,
    "max_length": 1536, "cold_start_steps": 60, "cold_start_batch_size": 16, "eval_size": 200,
    "save_every": 10}}

# ==== 2. Data: the built-in world, file formats and search engine are in retriever.py =======================
def load_data(cfg: Config) -> tuple[list[Document], list[Example], list[Example]]:
    """-> (documents, training examples, test examples). UserError names the file, the row and the remedy."""
    if cfg.data == "world":
        documents, *splits = env.make_world()
    else:
        if cfg.data == "hotpotqa" or cfg.data.endswith(".parquet"):
            from datasets import load_dataset, logging  # imported late: it is slow and seldom needed
            with env.told(f"--data {cfg.data}: it cannot be read or reached ({{}}); connect once, or take "
                          "a local file, --data world or --preset tiny."):
                logging.set_verbosity(logging.CRITICAL)
                hub = (load_dataset("hotpotqa/hotpot_qa", "distractor") if cfg.data == "hotpotqa"
                       else load_dataset("parquet", data_files=cfg.data))
            tables = [[(f"{cfg.data} {name}, row {n}", row) for n, row in enumerate(table, 1)]
                      for name, table in hub.items()]
        else:
            tables = [env.read_rows(cfg.data)]
        documents, *splits = env.read_questions(tables, cfg.seed)
    if cfg.corpus:
        documents = [env.read_document(*row) for row in env.read_rows(cfg.corpus)]
    require(documents, f"--data {cfg.data}: no documents come with it; give some with --corpus FILE.")
    return documents, *splits

# ==== 3. Prompt, tags and policy ============================================================================
INSTRUCTIONS = ("Answer the question below. Think in <think> and </think> when you get new information. To "
    "look something up, write <search> query </search>, as often as you like: results come in <information> "
    "and </information>. At the end write the answer alone, as in <answer> Beijing </answer>.\n")
RETRY = ("\nThat was not a valid action. To search, put a query between <search> and </search>; to answer, "
         "put the answer between <answer> and </answer>. Try again.\n")
TAGS = [f"<{slash}{name}>" for name in ("search", "information", "answer") for slash in ("", "/")]
CLOSING = re.compile("</(search|answer)>")

def parse_action(text: str) -> tuple[str, str]:
    """What a turn of the model asks for: ("search" | "answer" | "invalid", content). The pair that closes
    first counts, from its last opening tag; <information> of the model's own making is ignored (report 3).
    >>> parse_action("<think>use <search> tags</think><search> The Silver River </search>")
    ('search', 'The Silver River')
    """
    text = re.sub("<information>.*?(</information>|$)", " ", text, flags=re.DOTALL)
    for close in CLOSING.finditer(text):
        _, opened, content = text[: close.start()].rpartition(f"<{close[1]}>")
        if opened:
            return close[1], content.strip()
    return "invalid", ""

@env.remember
def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)

@lru_cache(10_000)
def as_data(tokenizer, text: str) -> str:
    """Questions and documents are data: tags and special tokens in them are pulled apart, as "< answer>"."""
    return env.pull_apart(text, {*TAGS, *tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})

def prompt_tokens(tokenizer, question: str) -> list[int]:
    """An episode's first tokens. The chat template is applied here and never again (report 37). A base model
    reads the instructions as plain text; a model whose words include the tags (tiny) needs none."""
    text = f"Question: {as_data(tokenizer, question)}\n"
    if tokenizer.chat_template:
        message = [{"role": "user", "content": INSTRUCTIONS + text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    elif TAGS[0] not in tokenizer.get_added_vocab():
        text = (tokenizer.bos_token or "") + INSTRUCTIONS + text
    return encode(tokenizer, text)

def observation_tokens(tokenizer, retriever, documents, query: str, cfg: Config) -> list[int]:
    """The environment's reply to a query. It has the documents that fit whole; of a first that is too long
    itself, it has the beginning. The closing tag is never cut (report 7)."""
    before, body, after = encode(tokenizer, "\n<information>"), [], encode(tokenizer, "</information>\n")
    room = max(0, cfg.max_obs_tokens - len(before) - len(after))
    found = env.found([documents[i] for i, _ in retriever.search(query, cfg.top_k)])
    for n, text in enumerate(found or ["No results found."]):
        part = encode(tokenizer, as_data(tokenizer, "\n" * (n > 0) + text))
        if n and len(body) + len(part) > room:
            break
        body += part[:room]
    return before + body + after

def precision(device: torch.device) -> torch.dtype:
    """What is computed in; master weights are float32 (report 33). Old cards, as the T4, lack bfloat16."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16

def autocast(device: torch.device):
    return torch.autocast(device.type, precision(device), enabled=precision(device) != torch.float32)

def load_policy(cfg: Config) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerFast]:
    """-> (model, tokenizer), float32 on the device and not cold-started. UserError if it cannot be had.
    "tiny" is a Qwen2 with 0.3M parameters, its tokens are whole words; nothing later knows the difference.
    Models stay in eval mode: no dropout (report 20)."""
    transformers.utils.logging.disable_progress_bar()
    gpu = torch.cuda.is_available()
    require(gpu or cfg.device != "cuda", "--device cuda: there is no usable CUDA GPU; take --device cpu.")
    if cfg.model == "tiny":
        documents, *splits = load_data(cfg)
        texts = [f"Doc {n % cfg.top_k + 1}(Title: {d.title}) {d.text}" for n, d in enumerate(documents)]
        texts += [f"Question: {e.question}" for part in splits for e in part] + ["No results found.", RETRY]
        words = Tokenizer(models.WordLevel(unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Split(Regex(r"Doc \d+\(Title:|\w+|[^\w\s]"), "removed", True)
        specials = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=[*specials.values()]))
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, clean_up_tokenization_spaces=True, **specials)
        tokenizer.add_tokens(TAGS)  # ordinary tokens: decoding without special tokens keeps them (report 11)
        torch.manual_seed(cfg.seed)  # a wide initializer_range: copying is then learnt three times sooner
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=cfg.max_length,
            pad_token_id=0, eos_token_id=1, tie_word_embeddings=True, initializer_range=0.06))
    else:
        with env.told(f"--model {cfg.model}: it is no model folder, and no hub model in reach ({{}}); check "
                      "the name, connect once, or take a local folder or --preset tiny."):
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(cfg.model)  # as saved
            model = transformers.AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.eval().to("cuda" if gpu and cfg.device != "cpu" else "cpu"), tokenizer

# ==== 4. Reward: pure functions of two texts ================================================================
def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (Search-R1): "The  U.S.!" -> "us"."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

def exact_match(prediction: str, answers) -> float:
    """1.0 if the prediction equals a gold answer, both normalised; an empty one equals none."""
    return float(normalize_answer(prediction) in {*map(normalize_answer, env.as_answers(answers))} - {""})

def f1_score(prediction: str, answers) -> float:
    """Token F1 after normalising, the best over the gold answers; yes and no count only as a whole."""
    words, alone, best = normalize_answer(prediction).split(), (["yes"], ["no"], ["noanswer"]), 0.0
    for gold in (normalize_answer(answer).split() for answer in env.as_answers(answers)):
        if words == gold or words not in alone and gold not in alone:
            common = sum((Counter(words) & Counter(gold)).values())
            best = max(best, 2 * common / max(1, len(words) + len(gold)))
    return best

# ==== 5. Rollout: write a turn, let the environment answer, go on ===========================================
@dataclass
class Episode:
    """One question's conversation. Token ids are made once and only appended to (reports 13 and 14)."""
    example: Example
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1 = the model wrote it, 0 = the environment did
    logps: list[float] = field(default_factory=list)  # the sampler's own log-probabilities, 0 where mask is 0
    status: str = ""  # once it has ended, one of env.STATUSES
    queries: list[str] = field(default_factory=list)
    answer: str = ""
    reward: float = 0.0  # em or f1, as the settings say
    em: float = 0.0
    f1: float = 0.0

    def extend(self, tokens: Sequence[int], logps: Sequence[float] | None = None) -> None:
        """Append the model's tokens (with their logps) or the environment's (without)."""
        self.tokens += tokens
        self.mask += [int(logps is not None)] * len(tokens)
        self.logps += [0.0] * len(tokens) if logps is None else logps

@torch.no_grad()
def rollout(model, tokenizer, retriever, documents: Sequence[Document], examples: Sequence[Example],
            cfg: Config, greedy: bool = False) -> list[Episode]:
    """Play one episode for each example, side by side -> the episodes, in the examples' order.
    The key-value cache lives through all turns; ended episodes leave it. A turn feeds what is new alone, its
    last token before and the environment's reply, as one left-padded chunk. `seen` [rows, slots] marks cache
    slots that hold a token; a token's position is how many precede it (18, 35). The host waits for a GPU once
    a token: a row that has closed its tag writes on, unread, and is unmarked after the turn."""
    device, retry = model.device, encode(tokenizer, RETRY)
    plain = model.config._attn_implementation == "sdpa" and not getattr(model.config, "sliding_window", 0)
    read = cache(lambda *ids: tokenizer.decode(ids, skip_special_tokens=True))  # a group repeats itself
    eos = model.generation_config.eos_token_id
    eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    episodes = [Episode(example) for example in examples]
    for episode in episodes:
        episode.extend(prompt_tokens(tokenizer, episode.example.question))
        episode.status = "truncated" if len(episode.tokens) + cfg.max_new_tokens > cfg.max_length else ""
    shared = len(os.path.commonprefix([e.tokens[:-1] for e in episodes]))  # instructions, prefilled once
    past, seen = transformers.DynamicCache(), torch.ones(len(episodes), shared, device=device).long()
    memory = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": past}
    if shared:
        with autocast(device):
            prefix = torch.tensor([episodes[0].tokens[:shared]], device=device)  # [1, shared]
            model(input_ids=prefix, attention_mask=seen[:1], use_cache=True, logits_to_keep=1, **memory)
        past.batch_repeat_interleave(len(episodes))
    rows, chunks = episodes, [e.tokens[shared:] for e in episodes]  # each row's episode, what is new to it
    for turn in range(cfg.max_turns + 1):
        keep = [r for r, episode in enumerate(rows) if not episode.status]
        if not keep:
            break
        rows, chunks, seen = [rows[r] for r in keep], [chunks[r] for r in keep], seen[keep]
        past.batch_select_indices(torch.tensor(keep, device=device))
        width = max(map(len, chunks))
        tokens = torch.tensor([[0] * (width - len(c)) + c for c in chunks], device=device)  # [rows, width]
        real = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in chunks], device=device)
        written, logps, writing = [[] for _ in rows], [[] for _ in rows], [True] * len(rows)
        for n in range(cfg.max_new_tokens):
            seen = torch.cat([seen, real], 1)
            positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1]:]  # [rows, width]
            mask = seen.bool()[:, None, None] if n and plain else seen  # 4-D: the host need not look into it
            with autocast(device):
                logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True,
                               logits_to_keep=1, **memory).logits[:, -1]  # [rows, vocabulary]
            logp = (logits.float() / cfg.temperature).log_softmax(-1)
            token = logp.argmax(-1, True) if greedy else torch.multinomial(logp.exp(), 1)  # [rows, 1]
            for r, (t, chosen) in enumerate(torch.cat([token.double(), logp.gather(1, token)], 1).tolist()):
                if writing[r]:
                    written[r].append(t := int(t))
                    logps[r].append(chosen)
                    # subtle: a tag may straddle tokens or share its last (Qwen's ">\n"), so the text is asked
                    writing[r] = t not in eos and not (">" in read(t) and CLOSING.search(read(*written[r])))
            if not any(writing):
                break
            tokens, real = token, torch.ones_like(token)
        fed = torch.tensor([[len(ids) - 1] for ids in written], device=device)  # all but a row's last token
        seen[:, seen.shape[1] - n:] = torch.arange(n, device=device) < fed
        for r, episode in enumerate(rows):
            episode.extend(written[r], logps[r])
            kind, content = parse_action(read(*(t for t in written[r] if t not in eos)))
            if kind == "answer":
                episode.status, episode.answer = "answered", content
            elif turn == cfg.max_turns:
                full = len(written[r]) == cfg.max_new_tokens and written[r][-1] not in eos
                episode.status = "out_of_turns" if kind == "search" else "truncated" if full else "invalid"
            else:
                reply = retry
                if kind == "search":
                    episode.queries.append(content)
                    reply = observation_tokens(tokenizer, retriever, documents, content, cfg)
                if len(episode.tokens) + len(reply) + cfg.max_new_tokens > cfg.max_length:
                    episode.status = "truncated"
                else:
                    episode.extend(reply)
                    chunks[r] = [written[r][-1], *reply]
    for episode in episodes:
        scored = episode.answer, episode.example.answers
        episode.em, episode.f1 = exact_match(*scored), f1_score(*scored)
        episode.reward = getattr(episode, cfg.reward)
    return episodes

# ==== 6. Log-probabilities: the one forward pass of training, for old and new alike =========================
LOGIT_ROWS, LOGITS = 1024, 2**26  # made at once, at most 0.3 GB; the backward pass makes them again (32)

def token_logprobs(model, tokens: Tensor, lengths: Tensor, temperature: float,
                   mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, T], lengths [B] -> (logp, entropy), both [B, T-1]: column t is token t + 1's.
    With `mask` [B, T], logits are made for the tokens it marks only; elsewhere and in the padding both are 0.
    logp is differentiable; float32 log-softmax at the sampler's temperature (reports 15 and 21)."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    real = places < lengths[:, None]  # [B, T] by length, never by token id: pad may equal EOS (report 17)
    with autocast(tokens.device):
        remade = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
        for layer in remade:  # its own flag turns checkpointing on (34); all below it stays in eval mode (20)
            layer.training = torch.is_grad_enabled()
        hidden = model.base_model(input_ids=tokens, attention_mask=real.long(), use_cache=False,
                                  position_ids=places.expand_as(tokens)).last_hidden_state  # [B, T, hidden]
        for layer in remade:
            layer.training = False
    wanted = (real if mask is None else real & mask.bool())[:, 1:]  # [B, T-1]
    def score(hidden, target):
        with autocast(tokens.device):
            logits = model.get_output_embeddings()(hidden)  # [n, vocabulary]
        logp = (logits.float() / temperature).log_softmax(-1)
        return logp.gather(1, target[:, None])[:, 0], -(logp.detach().exp() * logp.detach()).sum(-1)
    size = max(1, min(LOGIT_ROWS, LOGITS // model.config.vocab_size))
    chunks = zip(hidden[:, :-1][wanted].split(size), tokens[:, 1:][wanted].split(size))
    parts = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return tuple(torch.zeros(wanted.shape, device=tokens.device).masked_scatter(wanted, torch.cat(part))
                 for part in zip(*parts))

# ==== 7. Advantages ========================================================================================
def group_advantages(rewards: Tensor) -> Tensor:
    """Rewards [Q, G], a row a question -> advantages [Q, G]: (R - mean) / (std + 1e-6), sample std (eq. 4).
    A group without spread gets exactly 0, which rounded mean and std would not give. UserError if G < 2.
    >>> group_advantages(torch.tensor([[1., 0., 0.], [1., 1., 1.]]))
    tensor([[ 1.1547, -0.5773, -0.5773],
            [ 0.0000,  0.0000,  0.0000]])
    """
    require(rewards.ndim == 2 and rewards.shape[1] > 1, f"rewards: [Q, G >= 2], not {[*rewards.shape]}.")
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    return torch.where(rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True), 0.0, advantages)

# ==== 8. Losses: log-probabilities in, a scalar to minimise out ============================================
# logp, old_logp, mask are [B, T], advantages [B]. The mean is over a row's trained tokens, then over rows,
# one without any counting 0. exp is guarded at e^20, log_ratio never: its gradient must live at any distance.
def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B]: the mean over each row's trained tokens, 0 where there is none."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)

def grpo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, clip_eps=0.2) -> Tensor:
    """GRPO (eq. 3): the clipped ratio of every token times its episode's advantage.
    >>> old = torch.tensor([[-1., -1., -1.]])
    >>> grpo_loss(old, old, torch.tensor([2.]), torch.ones(1, 3))
    tensor(-2.)
    """
    log_ratio = torch.where(mask.bool(), logp - old_logp, 0.0)  # [B, T]
    ratio = log_ratio.clamp(max=20).exp()  # r_it
    adv = advantages[:, None]  # A_i, the same for every token of the episode
    objective = torch.minimum(ratio * adv, ratio.clamp(1 - clip_eps, 1 + clip_eps) * adv)
    return -row_mean(objective, mask).mean()

def sapo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, clip_eps=0.2,
              tau=1.0, gamma=0.1) -> Tensor:
    """SAPO (eq. 9-13): GRPO plus one line, which pulls up good episodes' tokens that have become less likely.
    1. GRPO's gradient on a token, r A, dies as r falls to 0, and no clip acts on that side. The line's is
       gamma at any r < tau; the old policy enters through the gate only.
    2. With one update a rollout r is 1, the gate r < 1 is shut, and SAPO is GRPO bit for bit.
    3. The gate sits exactly at r = 1: old_logp must come from the same forward pass, or rounding opens it.
    4. The authors' code gates on A >= 0 and r <= tau and so pushes all-wrong groups up; the paper does not.
    >>> old = torch.tensor([[-1., -1., -1.]])
    >>> sapo_loss(old - 1, old, torch.tensor([2.]), torch.ones(1, 3))  # -(2 / e - 0.1)
    tensor(-0.6358)
    """
    log_ratio = torch.where(mask.bool(), logp - old_logp, 0.0)  # [B, T]
    ratio = log_ratio.clamp(max=20).exp()  # r_it
    adv = advantages[:, None]  # A_i, the same for every token of the episode
    objective = torch.minimum(ratio * adv, ratio.clamp(1 - clip_eps, 1 + clip_eps) * adv)
    objective = objective + gamma * log_ratio * ((ratio < tau) & (adv > 0))  # + SAPO
    return -row_mean(objective, mask).mean()

def dspo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, clip_eps=3e-4) -> Tensor:
    """DSPO (arXiv 2510.09255, eq. 6, 11): one ratio an episode, its tokens' geometric mean, clipped whole."""
    log_ratio = torch.where(mask.bool(), logp - old_logp, 0.0)  # [B, T]
    ratio = row_mean(log_ratio, mask).clamp(max=20).exp()  # [B] s_i
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)
    return -(objective * mask.any(1)).mean()

def kl_loss(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """k3 estimate of KL(policy || reference), never negative, averaged as above (Table 4, report 27)."""
    gap = torch.where(mask.bool(), ref_logp - logp, 0.0).clamp(max=20)
    return row_mean(gap.exp() - gap - 1, mask).mean()

# ==== 9. Training: cold start, then rollout -> advantages -> updates, all of it on disk as it goes ==========
FILTER_TRIES, DEMONSTRATIONS = 4, 4000  # rollouts to fill a filtered step; demonstrations for the cold start

def micro_batches(episodes: Sequence[Episode], rows: Sequence[int], cfg: Config, device):
    """Cut `rows` into forward passes, like lengths together -> (rows, tokens [B, T], lengths [B], mask)."""
    rows = sorted(rows, key=lambda i: len(episodes[i].tokens))
    for part in (rows[i: i + cfg.micro_batch_size] for i in range(0, len(rows), cfg.micro_batch_size)):
        lengths = [len(episodes[i].tokens) for i in part]
        pad = [0] * lengths[-1]  # on the right
        both = [[(ids + pad)[: len(pad)] for ids in (episodes[i].tokens, episodes[i].mask)] for i in part]
        tokens, mask = torch.tensor(both, device=device).unbind(1)
        yield part, tokens, torch.tensor(lengths, device=device), mask

def descent(model) -> tuple:
    """-> (AdamW, the scaler that keeps float16 gradients from rounding to 0; idle in other precisions)."""
    kind = model.device.type
    return (torch.optim.AdamW(model.parameters(), weight_decay=0.01, fused=kind == "cuda"),
            torch.amp.GradScaler(kind, enabled=precision(model.device) == torch.float16))

def descend(optimizer, scaler) -> Tensor:
    """One step down the gradients gathered so far, cut to length 1 -> their length before."""
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm

def cold_start(model, tokenizer, retriever, documents, train_examples, cfg: Config) -> None:
    """Teach `model`, in place, tags and copying on imperfect demonstrations, or take it from the disk cache,
    whose key holds all that shapes the result: runs that differ in loss start from the same policy."""
    rng, demos = random.Random(cfg.seed), []
    for example in rng.choices(train_examples, k=DEMONSTRATIONS):
        episode = Episode(example)
        episode.extend(prompt_tokens(tokenizer, example.question))
        *searches, last = env.demonstration(example, train_examples, rng)
        for kind, content in [*searches[: cfg.max_turns], last]:
            episode.extend(tokens := encode(tokenizer, f"<{kind}>{content}</{kind}>"), [0.0] * len(tokens))
            if kind == "search":
                episode.extend(observation_tokens(tokenizer, retriever, documents, content, cfg))
        demos += [episode] if len(episode.tokens) <= cfg.max_length else []
    require(demos, "--max_length: no demonstration fits into it; raise it.")
    file = env.cache_file([
        cfg.seed, cfg.temperature, cfg.micro_batch_size, cfg.cold_start_steps, cfg.cold_start_batch_size,
        [(e.tokens, e.mask) for e in demos], torch.__version__, str(model.device),
        *map(inspect.getsource, (cold_start, token_logprobs, micro_batches, row_mean, descend))],
        (weights.cpu().numpy() for weights in model.state_dict().values()))
    if file.exists():
        print(f"Cold start: taken from {file}")
        with env.intact(file):
            model.load_state_dict(torch.load(file, map_location=model.device, weights_only=True))
        return
    peak = 3e-3 / max(1, sum(p.numel() for p in model.parameters()) / 1e6) ** 0.5  # the larger, the slower
    optimizer, scaler = descent(model)
    for step in (bar := tqdm(range(cfg.cold_start_steps), desc="cold start", mininterval=0.5)):
        decay = 0.55 + 0.45 * math.cos(math.pi * step / cfg.cold_start_steps)  # from 1 to a tenth
        optimizer.param_groups[0]["lr"] = peak * decay * min(1, (step + 1) / (1 + cfg.cold_start_steps // 20))
        batch = rng.choices(range(len(demos)), k=cfg.cold_start_batch_size)
        for rows, tokens, lengths, mask in micro_batches(demos, batch, cfg, model.device):
            logp, _ = token_logprobs(model, tokens, lengths, cfg.temperature, mask)
            loss = -row_mean(logp, mask[:, 1:]).mean()
            scaler.scale(loss * len(rows) / len(batch)).backward()
        descend(optimizer, scaler)
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    env.keep(file, partial(torch.save, model.state_dict()))

def evaluate(agent: tuple, examples: Sequence[Example], cfg: Config) -> tuple[dict, list[Episode]]:
    """Greedy, every example, in order (report 40) -> (summary, episodes). `agent` comes from load_agent."""
    episodes, size = [], cfg.questions_per_step * cfg.group_size
    for i in (bar := tqdm(range(0, len(examples), size), desc="evaluation", leave=False)):
        episodes += rollout(*agent, examples[i: i + size], cfg, greedy=True)
        bar.set_postfix({name: f"{env.summary(episodes)[name]:.2f}" for name in ("em", "searches")})
    return env.summary(episodes), episodes

def load_agent(cfg: Config) -> tuple[tuple, list[Example], list[Example]]:
    """-> ((model, tokenizer, retriever, documents), training examples, test examples to evaluate on)."""
    documents, train_examples, test_examples = load_data(cfg)
    retriever = TfidfRetriever([f"{d.title} {d.text}" for d in documents])
    return (*load_policy(cfg), retriever, documents), train_examples, test_examples[: cfg.eval_size or None]

def load_run(folder: str) -> tuple[Config, list[dict]]:
    """A run folder -> (settings, history as from `train`: what was not measured at a step is None)."""
    with env.intact(folder):
        cfg = Config(**env.read_json(folder, (Path(folder) / "config.json").read_bytes()))
        cfg.check()
        return cfg, env.read_table(Path(folder) / "metrics.csv")

def load_checkpoint(cfg: Config) -> dict:
    """The state of run cfg.resume, read without running code in it. UserError unless whole and fitting."""
    path = Path(cfg.resume) / "checkpoint.pt"
    with env.intact(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        env.check_resume(path, asdict(cfg), dict(state["config"]), state["history"], dict(state["looks"]))
    return state

def sample_groups(agent: tuple, examples: Sequence[Example], step: int, cfg: Config) -> tuple[list, list]:
    """-> (groups to train on, all groups): G episodes of one question, kept apart by index (report 24)."""
    groups, everything, dynamic = [], [], cfg.dynamic_filter or cfg.algo == "dspo"
    for attempt in range(FILTER_TRIES if dynamic else 1):
        rng, missing = random.Random(f"{cfg.seed} {step} {attempt}"), cfg.questions_per_step - len(groups)
        asked = rng.sample(examples, min(missing, len(examples)))  # no state: a resumed run draws the same
        episodes = rollout(*agent, [example for example in asked for _ in range(cfg.group_size)], cfg)
        sampled = [episodes[i: i + cfg.group_size] for i in range(0, len(episodes), cfg.group_size)]
        everything += sampled
        groups += [group for group in sampled if not dynamic or len({e.reward for e in group}) > 1]
        if len(groups) == cfg.questions_per_step:
            break
    return groups, everything

def update(model, reference, optimizer, scaler, episodes, advantages: Tensor, loss_fn, cfg: Config) -> dict:
    """Learn from one rollout in minibatches x epochs updates -> metrics of how far the policy moved."""
    plan, moved, norms, entropies = [], [], [], []  # plan[minibatch][micro-batch] = tensors
    torch.cuda.empty_cache()  # what the rollout's key-value cache took
    for part in torch.randperm(len(episodes)).tensor_split(min(cfg.minibatches, len(episodes))):
        plan.append([])
        for rows, tokens, lengths, mask in micro_batches(episodes, part.tolist(), cfg, model.device):
            with torch.no_grad():  # as the updates do it, row by row: r starts at exactly 1 (19, 21)
                old, entropy = token_logprobs(model, tokens, lengths, cfg.temperature, mask)
                ref = reference and token_logprobs(reference, tokens, lengths, cfg.temperature, mask)[0]
            plan[-1].append((tokens, lengths, mask, advantages[rows].to(model.device), old, ref))
            entropies.append(entropy[mask[:, 1:].bool()])
    for mini in plan * cfg.epochs:
        for tokens, lengths, mask, adv, old, ref in mini:
            logp, _ = token_logprobs(model, tokens, lengths, cfg.temperature, mask)  # [B, T-1]
            loss = loss_fn(logp, old, adv, mask[:, 1:])
            loss = loss + cfg.kl_coef * kl_loss(logp, ref, mask[:, 1:]) if reference else loss
            share = len(adv) / sum(len(micro[3]) for micro in mini)  # one normaliser (report 28)
            scaler.scale(loss * share).backward()
            log_ratio, on = logp.detach() - old, mask[:, 1:].bool()
            moved.append((log_ratio[on], adv[:, None].expand_as(on)[on], log_ratio.sum(1)))
        norms.append(descend(optimizer, scaler))
    log_ratio, adv, totals = map(torch.cat, zip(*moved))  # [tokens], [tokens], [episodes]
    ratio, good = log_ratio.exp(), adv > 0
    clipped = (ratio > 1 + cfg.clip_eps) & good | (ratio < 1 - cfg.clip_eps) & (adv < 0)
    parts = {"ratio_mean": ratio, "ratio_min": ratio.sort()[0][:1], "ratio_positive": ratio[good],
             "clip_frac": clipped, "gate_frac": (ratio < cfg.tau) & good, "isdd": totals < math.log(0.01),
             "kl_old": -log_ratio, "entropy": torch.cat(entropies), "grad_norm": torch.stack(norms)}
    return {name: values.float().mean().item() if len(values) else None for name, values in parts.items()}

def train(cfg: Config, loss_fn: Callable[..., Tensor] | None = None) -> list[dict]:
    """Train as `cfg` says into the folder `cfg.out`, set if empty -> the history, a dict of METRICS a step.
    `loss_fn(logp, old_logp, advantages, mask) -> scalar`, a mean over rows, replaces the algorithm's. Step
    0 is the evaluation before training. All is on disk after each step, so that `resume` goes on exactly."""
    cfg.check()
    started, state = time.time(), load_checkpoint(cfg) if cfg.resume else None
    looks, history, warned = {}, [], set()
    agent, train_examples, test_examples = load_agent(cfg)
    model, tokenizer, retriever, documents = agent
    cfg.out = cfg.resume or env.open_folder(cfg.out, f"{cfg.algo}-s{cfg.seed}")
    out, written = Path(cfg.out), Path(cfg.out, "episodes.jsonl")
    if cfg.cold_start_steps and (not cfg.resume or cfg.kl_coef):
        cold_start(*agent, train_examples, cfg)
    cold_seconds, (optimizer, scaler) = time.time() - started, descent(model)
    reference = copy.deepcopy(model).to(precision(model.device)) if cfg.kl_coef else None
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    torch.manual_seed(cfg.seed)
    if cfg.resume:
        with env.intact(out / "checkpoint.pt"):
            for name, part in parts.items():
                part.load_state_dict(state[name])
            torch.set_rng_state(state["rng"])
            torch.cuda.set_rng_state_all(state["cuda_rng"])
            os.truncate(written, state["written"])
            looks, history = state["looks"], state["history"]
    env.begin(out, asdict(cfg) | {"resume": ""})
    loss_fn = loss_fn or {"grpo": partial(grpo_loss, clip_eps=cfg.clip_eps),
                          "sapo": partial(sapo_loss, clip_eps=cfg.clip_eps, tau=cfg.tau, gamma=cfg.gamma),
                          "dspo": dspo_loss}[cfg.algo]
    done, total = len(history), cfg.steps + 1
    for step in (bar := tqdm(range(done, total), desc=cfg.algo, initial=done, total=total)):
        row, clock = {"step": step}, time.time()
        if step:
            groups, everything = sample_groups(agent, train_examples, step, cfg)
            row |= env.summary(episodes := [e for group in everything for e in group])
            row["zero_spread"] = sum(len({e.reward for e in g}) == 1 for g in everything) / len(everything)
            row["lr"] = cfg.lr * (1 - (1 - cfg.lr_end) * (step - 1) / max(1, cfg.steps - 1))
            optimizer.param_groups[0]["lr"] = row["lr"]
            if groups:
                kept = [e for group in groups for e in group]
                advantages = group_advantages(torch.tensor([e.reward for e in kept]).view(len(groups), -1))
                row |= update(model, reference, optimizer, scaler, kept, advantages.flatten(), loss_fn, cfg)
            row["tokens_per_s"] = sum(sum(e.mask) for e in episodes) / (time.time() - clock)
            env.append_episodes(written, step, everything[0], tokenizer)
            bar.set_postfix(reward=f"{row['reward']:.2f}", searches=f"{row['searches']:.2f}", refresh=False)
            for advice in env.complaints(row, warned):
                tqdm.write(f"WARNING at step {step}: {advice}")
        if step % cfg.eval_every == 0 or step == cfg.steps:
            looks[step], episodes = evaluate(agent, test_examples, cfg)
            row |= {f"eval_{name}": looks[step][name] for name in ("em", "f1", "searches")}
            if looks[step]["em"] == max(look["em"] for look in looks.values()):
                for part in (model, tokenizer):  # the best yet, for --model (report 42)
                    part.save_pretrained(out / "best")
            if step in (0, cfg.steps):
                tqdm.write(f"\nAfter {step} steps:\n{env.show_longest(episodes, tokenizer)}\n")
        history.append({name: row.get(name) for name in env.METRICS})
        env.replace_file(out / "metrics.csv", partial(env.write_table, history))
        if step % cfg.save_every == 0 or step == cfg.steps:
            env.replace_file(out / "checkpoint.pt", partial(torch.save, {
                "config": asdict(cfg), "looks": looks, "history": history, "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all(), "written": written.stat().st_size,
                **{name: part.state_dict() for name, part in parts.items()}}))
    guess = evaluate(agent, test_examples, replace(cfg, max_turns=0))[0]["em"]
    bound = env.one_search(retriever, documents, test_examples, cfg.top_k)
    print(env.compare(looks[0], looks[cfg.steps], guess, bound))
    print(env.costs(cold_seconds, time.time() - started, history, torch.cuda.max_memory_allocated()), out)
    return history

# ==== 10. Command line ======================================================================================
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line -> exit code: 0, 2 for something the user can mend, 130 after Ctrl-C."""
    argv, cfg = sys.argv[1:] if argv is None else list(argv), Config()
    try:
        given = env.read_flags(argv, __doc__.split("\n")[0], Config, SENTENCES)
        question, preset, run = given.pop("ask", None), given.pop("preset", None), given.get("resume")
        require(question is None or run, "--ask: say whose agent, with --resume RUN_FOLDER.")
        require(not run or not preset and "out" not in given, "--preset, --out: a run has its own; omit.")
        if not run and preset is None:
            room = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 14 * 2**30
            preset, why = ("qwen", "there is a") if room else ("tiny", "there is no")
            print(f"Preset {preset}, for {why} CUDA GPU with 15 GB free; choose with --preset.")
            argv += ["--preset", preset]
        cfg = replace(load_run(run)[0] if run else Config.preset(preset), **given)
        if question is None:
            train(cfg)
            print("Again: python sapo_min.py", *argv)
        else:
            state, (agent, _, _) = load_checkpoint(cfg), load_agent(cfg)
            with env.intact(Path(run) / "checkpoint.pt"):
                agent[0].load_state_dict(state["model"])
            print(env.transcript(rollout(*agent, [Example(question, ())], cfg, greedy=True)[0], agent[1]))
    except UserError as error:
        print(f"sapo_min: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nStopped; {env.how_to_go_on(cfg.out)}", file=sys.stderr)
        return 130
    return 0

if __name__ == "__main__":
    sys.exit(main())
