"""The actor's side of `map_batches`: rows of all batches share one engine, and each gets what it would get alone."""

import asyncio

import pytest

from pagedcli.batch.stream import RowStream
from pagedcli.distributed import PagedBatchGenerator
from pagedcli.errors import PagedcliError, UsageError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'pagedcli[parquet]'")

ENGINE = {"dtype": "float32", "num_kvcache_blocks": 200, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def generator():
    generator = PagedBatchGenerator(sampling={"max_tokens": 8}, output_token_ids=True, **ENGINE)
    yield generator
    generator.close()


def answers(generator, *batches):
    async def all_at_once():
        return await asyncio.gather(*(generator(batch) for batch in batches))

    return asyncio.run(all_at_once())


def table(num_rows, **columns):
    return pa.table({"prompt": [f"Story number {row}: Once upon" for row in range(num_rows)], **columns})


def test_every_row_has_its_answer_and_keeps_its_other_columns(generator):
    [answer] = answers(generator, table(5, label=list("abcde"), id=[1, 1, 1, 1, 1]))
    assert answer["label"].to_pylist() == list("abcde")
    assert all(answer["text"].to_pylist())
    assert [len(token_ids) for token_ids in answer["token_ids"].to_pylist()] == [8] * 5
    assert answer["usage"].to_pylist()[0]["completion_tokens"] == 8


def test_the_error_column_is_typed_where_no_row_failed(generator):
    [good] = answers(generator, table(2))
    [bad] = answers(generator, table(2, temperature=[0.0, -1.0]))
    assert good["error"].null_count == 2
    assert good["error"].type == bad["error"].type


def test_a_bad_row_is_an_error_value_and_the_others_do_not_notice(generator):
    [alone] = answers(generator, table(3))
    [mixed] = answers(generator, table(3, max_tokens=[None, -5, None]))
    assert mixed["error"].to_pylist()[1]["code"] == "invalid_parameter"
    assert [mixed["text"].to_pylist()[row] for row in (0, 2)] == [alone["text"].to_pylist()[row] for row in (0, 2)]


def test_sampling_columns_are_of_their_row(generator):
    [answer] = answers(generator, table(3, max_tokens=[1, 2, None], n=[None, None, 2]))
    assert [len(ids) if ids else None for ids in answer["token_ids"].to_pylist()] == [1, 2, None]
    assert [len(sample["token_ids"]) for sample in answer["outputs"].to_pylist()[2]] == [8, 8]


def test_messages_and_bodies_are_answered_as_well(generator):
    messages = [{"role": "user", "content": "hello"}]
    [of_messages] = answers(generator, pa.table({"messages": [messages]}))
    [of_body] = answers(generator, pa.table({"body": [{"messages": messages, "model": "x"}]}))
    assert of_messages["text"] == of_body["text"]
    assert of_messages["error"].null_count == 1


def test_numpy_and_pandas_batches_give_the_same_table(generator):
    numpy = pytest.importorskip("numpy")
    batch = {"prompt": numpy.array(["a", "b"], object), "max_tokens": numpy.array([2, 3])}
    [of_numpy] = answers(generator, batch)
    [of_table] = answers(generator, pa.table({"prompt": ["a", "b"], "max_tokens": [2, 3]}))
    assert of_numpy.equals(of_table)


def test_draws_depend_on_the_row_and_not_on_its_batch(generator):
    warm = {"temperature": [1.0] * 6}
    [together] = answers(generator, table(6, **warm))
    apart = answers(generator, *(table(6, **warm).slice(row, 1) for row in reversed(range(6))))
    assert [each["text"].to_pylist()[0] for each in reversed(apart)] == together["text"].to_pylist()
    assert len(set(together["text"].to_pylist())) > 1


def test_rows_of_several_batches_are_in_the_engine_at_once(generator):
    """Batches of one long and some short rows: they do not wait for each other's long row."""
    stats = generator._stream.stats
    steps = stats.facts.num_steps
    answers(generator, table(4, max_tokens=[256, 2, 2, 2], ignore_eos=[True] * 4))
    num_alone = stats.facts.num_steps - steps
    steps = stats.facts.num_steps
    answers(generator, *(table(4, max_tokens=[256, 2, 2, 2], ignore_eos=[True] * 4) for _ in range(2)))
    assert stats.facts.num_steps - steps < 1.8 * num_alone


def test_a_batch_larger_than_what_the_engine_holds_waits_and_is_done(generator):
    [answer] = answers(generator, table(100, max_tokens=[1 + row % 3 for row in range(100)]))
    assert [len(ids) for ids in answer["token_ids"].to_pylist()] == [1 + row % 3 for row in range(100)]


def test_columns_that_the_answer_adds_are_refused(generator):
    with pytest.raises(UsageError, match="column 'text'"):
        answers(generator, table(1, text=["x"]))


def test_unknown_keywords_are_refused_with_the_nearest_one():
    with pytest.raises(TypeError, match="max_num_seqs"):
        PagedBatchGenerator(max_num_seq=3)


def test_an_error_in_the_engine_fails_all_that_wait():
    generator = PagedBatchGenerator(**ENGINE)
    stream: RowStream = generator._stream
    stream.engine.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        answers(generator, table(3))
    with pytest.raises(ZeroDivisionError):
        answers(generator, table(1))


def test_a_stream_that_is_stopped_fails_what_is_not_done():
    generator = PagedBatchGenerator(sampling={"max_tokens": 1500, "ignore_eos": True}, **ENGINE)

    async def stopped():
        task = asyncio.create_task(generator(table(8)))
        await asyncio.sleep(0.05)
        generator._stream.stop()
        return await task

    with pytest.raises(PagedcliError, match="stopped"):
        asyncio.run(stopped())
