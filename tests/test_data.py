"""Data: every row becomes the problem its file says, a malformed one is refused by line, the order resumes anywhere."""

import json
from collections import Counter

import pytest

from sparse_rl import UserError, load_tokenizer
from sparse_rl.config import DataConfig
from sparse_rl.data.arithmetic import grade, make_problems, split_of
from sparse_rl.data.examples import Example, load
from sparse_rl.data.order import Order
from sparse_rl.data.prompts import encode

MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "1+1="}]


def load_text(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(str(path), "train", n=1, seed=0).examples


def load_rows(path, *rows):
    return load_text(path, "\n".join(json.dumps(row) for row in rows))


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data.jsonl"


def test_the_task_makes_as_many_problems_as_asked_of_its_split():
    for split in ("train", "test"):
        examples = load("arithmetic", split, n=20, seed=1).examples
        assert [example.prompt for example in examples] == [problem.prompt for problem in make_problems(20, 1, split=split)]
        assert {split_of(example.prompt) for example in examples} == {split}
        assert all(example.columns == {"answer": example.answer} for example in examples)
        assert all(grade(example.answer, example.answer) == 1.0 for example in examples)


def test_a_file_gives_all_its_rows_in_order(path):
    examples = load_rows(path, *({"prompt": f"{i}+0=", "answer": i, "level": [i], "source": None} for i in range(30)))
    assert [example.prompt for example in examples] == [f"{i}+0=" for i in range(30)]
    assert examples[3] == Example("3+0=", "3", {"answer": "3", "level": [3], "source": None})


@pytest.mark.parametrize("name", ["prompt", "problem", "question"])
def test_the_problem_may_be_called_prompt_problem_or_question(path, name):
    assert load_rows(path, {name: " 1+1=\n", "answer": "2"}) == [Example(" 1+1=\n", "2", {"answer": "2"})]


@pytest.mark.parametrize("name", ["prompt", "problem", "question"])
def test_a_prompt_may_be_messages(path, name):
    assert load_rows(path, {name: MESSAGES, "answer": "2"}) == [Example(MESSAGES, "2", {"answer": "2"})]


@pytest.mark.parametrize(("answer", "text"), [("2", "2"), (2, "2"), (-0.5, "-0.5"), (" 2 ", " 2 "), (10**20, "1" + "0" * 20)])
def test_an_answer_is_text(path, answer, text):
    [example] = load_rows(path, {"prompt": "?", "answer": answer})
    assert example.answer == example.columns["answer"] == text


def test_a_file_may_have_no_answers(path):
    assert load_rows(path, {"prompt": "?", "level": 1}) == [Example("?", None, {"level": 1})]


def test_rows_without_an_answer_are_left_out_and_counted(path):
    answers = ["1", "", None, "4", " \n", 0]
    rows = [{"prompt": str(i), "answer": answer} for i, answer in enumerate(answers)] + [{"prompt": "6"}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    loaded = load(str(path), "train", n=1, seed=0)
    assert [(example.prompt, example.answer) for example in loaded.examples] == [("0", "1"), ("3", "4"), ("5", "0")]
    assert loaded.skipped == 4
    assert loaded.note == (f"4 of 7 rows of {path} have no answer and are skipped ({path}:2, {path}:3, {path}:5, …).")


def test_a_note_about_one_row_is_in_the_singular(path):
    path.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": ""}')
    assert load(str(path), "train", n=1, seed=0).note == f"1 of 2 rows of {path} has no answer and is skipped ({path}:2)."
    path.write_text('{"prompt": "b", "answer": ""}')
    with pytest.raises(UserError, match="answer is empty in its only row"):
        load(str(path), "train", n=1, seed=0)


def test_nothing_is_said_where_nothing_is_left_out(path):
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    loaded = load(str(path), "train", n=1, seed=0)
    assert (len(loaded.examples), loaded.skipped, loaded.note) == (2, 0, None)


def test_a_file_whose_answers_are_all_empty_is_refused(path):
    with pytest.raises(UserError, match="no problem that can be graded: answer is empty in all 2 rows"):
        load_rows(path, {"prompt": "a", "answer": ""}, {"prompt": "b", "answer": None})


def test_a_column_that_only_some_rows_have_is_none_in_the_others(path):
    rows = load_rows(path, {"prompt": "a", "unit": "cm"}, {"prompt": "b", "level": 3}, {"prompt": "c"})
    assert [row.columns for row in rows] == [
        {"unit": "cm", "level": None}, {"unit": None, "level": 3}, {"unit": None, "level": None},
    ]  # fmt: skip


def test_byte_order_mark_blank_lines_and_line_ends_do_not_matter(path):
    text = '\ufeff{"prompt": "a"}\r\n\n  \n{"prompt": "b"}\n\n'
    assert [example.prompt for example in load_text(path, text)] == ["a", "b"]


def test_unicode_line_separators_do_not_end_a_line(path):
    prompt = "a\u2028b\u2029c\x85d\x0be\x0cf"
    text = json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" + '{"prompt": "\\ud83d\\ude00"}'
    assert [example.prompt for example in load_text(path, text)] == [prompt, "\N{GRINNING FACE}"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "?"', "not valid JSON"),
        ("prompt: ?", "not valid JSON"),
        ('{"prompt": "a"} {"prompt": "b"}', "not valid JSON"),
        ('{"prompt": NaN}', "NaN is not valid in JSON"),
        ('{"prompt": "?", "level": ' + "9" * 5000 + "}", "cannot be parsed"),
        ("[" * 100_000, "cannot be parsed"),
        ('{"prompt": "?", "answer": 1e999}', "cannot be parsed (1e999 is too large for a 64-bit float)"),
        ('{"prompt": "?", "prompt": "!"}', "cannot be parsed (an object has duplicate keys prompt)"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (
            '{"prompt": "\\ud83d"}',
            "an unpaired surrogate",
        ),
        ('"?"', "the line is a text: write one object per line"),
        ("null", "the line is null"),
        ('[{"prompt": "?"}]', "the line is a list"),
        ('{"text": "?", "answer": 1}', "no column is named prompt, problem or question (found text, answer)"),
        ("{}", "no column is named prompt, problem or question (found none)"),
        ('{"prompt": "?", "problem": "?"}', "several columns may hold the problem (prompt and problem): choose one"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"problem": " \\n"}', "problem is empty"),
        ('{"prompt": []}', "prompt is empty"),
        ('{"prompt": [{"role": "user", "content": " "}]}', "prompt is empty"),
        ('{"prompt": 3}', "prompt is a number: it must be text, or a list of messages."),
        ('{"prompt": null}', "prompt is empty"),
        ('{"prompt": ["?"]}', "message 1 is a text"),
        ('{"prompt": [{"role": "user", "content": "?"}, {"content": "?"}]}', "message 2 has no role"),
        ('{"prompt": [{"role": "user"}]}', "message 1 has no content"),
        ('{"prompt": [{"role": "user", "content": ["?"]}]}', "content of message 1 is a list"),
        ('{"prompt": [{"role": null, "content": "?"}]}', "role of message 1 is null"),
        ('{"prompt": "?", "answer": true}', "answer is true or false"),
        ('{"prompt": "?", "answer": ["2"]}', "answer is a list"),
        (
            '{"prompt": "?", "completions": 1}',
            "column completions has the name of an argument",
        ),
        (
            '{"prompt": "?", "prompts": 1}',
            "column prompts has the name of an argument",
        ),
        (
            '{"prompt": "?", "finish": "stop"}',
            "column finish has the name of an argument",
        ),
        (
            '{"prompt": "?", "completion_ids": [1]}',
            "column completion_ids has the name of an argument",
        ),
    ],
)
def test_a_malformed_row_is_refused_by_file_and_line(path, line, sentence):
    with pytest.raises(UserError) as refused:
        load_text(path, b"\n\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    assert sentence in str(refused.value) and str(refused.value).startswith(f"{path}:3: ")
    assert "\n" not in str(refused.value) and str(refused.value)[-1] in ".?"


def test_a_row_without_the_others_prompt_is_refused(path):
    with pytest.raises(
        UserError, match=r"data.jsonl:2: column prompt is missing \(found problem, answer\): every row must have its problem"
    ):
        load_rows(path, {"prompt": "a", "answer": "1"}, {"problem": "b", "answer": "2"})


@pytest.mark.parametrize("text", ["", "\n \n", "\ufeff"])
def test_an_empty_file_is_refused(path, text):
    with pytest.raises(UserError, match="data.jsonl has no rows: write one row per problem, with a prompt and an answer."):
        load_text(path, text)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("dat.jsonl", "No task or file is named dat.jsonl: did you mean data.jsonl?"),
        ("sub/tests.jsonl", "did you mean sub/test.jsonl?"),
        ("arithmetics", "did you mean arithmetic?"),
        ("gsm8", "No task or file is named gsm8: did you mean gsm8k?"),
        ("olympiad-bench", "did you mean olympiadbench?"),
        ("nowhere/at/all", "pass a task (arithmetic, simplerl-zoo-hard, gsm8k, "),
        ("nowhere/at/all", "file, or a hub dataset such as openai/gsm8k:main."),
        ("sub", "sub cannot be read"),
        ("data.jsonl/x", "No task or file is named data.jsonl/x"),
        ("sub/x", "No task or file is named sub/x"),
    ],
)
def test_a_source_that_is_not_there_is_refused_with_the_nearest(path, source, sentence):
    path.write_text("{}")
    (path.parent / "sub").mkdir()
    (path.parent / "sub" / "test.jsonl").write_text("{}")
    with pytest.raises(UserError) as refused:
        load(source, "test", n=1, seed=0)
    assert sentence in str(refused.value)


@pytest.fixture
def tokenizer():
    return load_tokenizer("tiny")


CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def text_of(tokenizer, *args, **options):
    ids = encode(tokenizer, *args, **options)
    assert type(ids) is list and all(type(token) is int for token in ids)
    return tokenizer.decode(ids)


def test_a_text_is_a_message_where_the_tokenizer_knows_chats(tokenizer):
    example = Example("1+1=", "2", {})
    assert text_of(tokenizer, example) == "<bos>1+1="
    tokenizer.chat_template = CHAT
    assert text_of(tokenizer, example) == "[user]1+1=[assistant]"
    assert text_of(tokenizer, example, raw=True) == "<bos>1+1="


def test_the_template_goes_around_the_problem_and_keeps_its_braces(tokenizer):
    template = "{x} \\boxed{} {{ {prompt} }} %s {0}"
    assert text_of(tokenizer, Example("{prompt} {y}", None, {}), template) == "<bos>{x} \\boxed{} {{ {prompt} {y} }} %s {0}"
    tokenizer.chat_template = CHAT
    assert text_of(tokenizer, Example(MESSAGES, None, {}), "Solve {prompt}!") == "[system][user]Solve 1+1=![assistant]"
    assert MESSAGES[1]["content"] == "1+1="


def test_an_examples_own_template_stands_where_none_is_given(tokenizer):
    example = Example("1+1=", "2", {}, "{prompt} So:")
    assert text_of(tokenizer, example) == text_of(tokenizer, example, None) == "<bos>1+1= So:"
    assert text_of(tokenizer, example, "{prompt}") == "<bos>1+1="


def test_messages_need_a_chat_template(tokenizer):
    example = Example(MESSAGES, "2", {})
    with pytest.raises(UserError, match="no chat template: add chat_template.jinja to the model.s folder"):
        encode(tokenizer, example)
    tokenizer.chat_template = CHAT
    assert text_of(tokenizer, example) == "[system][user]1+1=[assistant]"
    with pytest.raises(UserError, match="data.raw is set: unset it"):
        encode(tokenizer, example, raw=True)


def test_a_prompt_the_chat_template_refuses_is_the_users_to_mend(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(UserError, match=r"chat template raised an error for a prompt \(no system role\)"):
        encode(tokenizer, Example(MESSAGES, "2", {}))


def test_settings_say_what_to_evaluate_on():
    assert DataConfig().held_out == ("arithmetic",)
    assert DataConfig(test="test.jsonl").held_out == ("test.jsonl",)
    assert DataConfig(train="train.jsonl").held_out == ()
    assert DataConfig(train="train.jsonl", test="arithmetic").held_out == ("arithmetic",)
    assert DataConfig(train="gsm8k").held_out == ("gsm8k",)
    assert DataConfig(train="simplerl-zoo-hard").held_out == ()
    assert DataConfig(train="simplerl-zoo-hard", test="math500").held_out == ("math500",)


def test_a_template_without_the_problem_is_refused():
    with pytest.raises(UserError, match=" has no placeholder for the problem: add "):
        DataConfig(template="Solve {problem}.")
    assert DataConfig(template="{prompt} {").template == "{prompt} {"


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_every_epoch_sees_every_problem_once_in_a_new_order(n):
    order = Order(n, seed=3)
    epochs = [order.take(epoch * n, n) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert n < 7 or len({tuple(epoch) for epoch in epochs}) == 4
    assert Counter(order.take(0, 4 * n)) == dict.fromkeys(range(n), 4)


def test_the_order_goes_on_from_any_cursor():
    whole = Order(10, seed=0).take(0, 95)
    for size in (1, 3, 8, 32):
        parts = [index for cursor in range(0, 95, size) for index in Order(10, seed=0).take(cursor, size)]
        assert parts[:95] == whole
    assert Order(10, seed=0).take(42, 7) == whole[42:49]
    assert Order(10, seed=0).take(10**12, 10) == Order(10, seed=0).take(10**12, 10)
    assert Order(10, seed=0).take(5, 0) == []


def test_seeds_give_different_orders_that_never_change():
    # a run resumed on another machine or version must see the same problems
    assert Order(10, seed=0).take(0, 20) == [6, 4, 3, 1, 7, 0, 8, 2, 5, 9, 5, 1, 8, 4, 7, 2, 6, 9, 0, 3]
    assert Order(10, seed=0).take(0, 20) != Order(10, seed=1).take(0, 20)


def test_nothing_cannot_be_ordered():
    with pytest.raises(ValueError, match="at least 1"):
        Order(0, seed=0)
