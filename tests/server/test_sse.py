"""Work that is begun on the spot, and goes on in a task only if it has to wait."""

import asyncio

import pytest

from cllm.server.sse import begin


def test_work_that_never_waits_is_done_without_a_task():
    done = []

    async def work():
        done.append(1)

    async def test():
        assert begin(work()) is None
        assert done == [1]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(test())


def test_error_before_the_first_wait_is_raised_on_the_spot():
    async def work():
        raise OSError("gone")

    async def test():
        with pytest.raises(OSError, match="gone"):
            begin(work())

    asyncio.run(test())


def test_work_that_waits_goes_on_in_a_task_each_time_its_future_is_done():
    """It gets the results of what it waits for, and has not run further than that meanwhile."""
    seen = []

    async def test():
        futures = [asyncio.get_running_loop().create_future() for _ in range(3)]

        async def work():
            for future in futures:
                result = await future
                seen.append(result)

        task = begin(work())
        for i, future in enumerate(futures):
            await asyncio.sleep(0.01)
            assert seen == list(range(i))
            future.set_result(i)
        await task
        assert seen == [0, 1, 2]

    asyncio.run(test())


def test_error_of_what_is_waited_for_reaches_the_work_and_its_task():
    async def test():
        future = asyncio.get_running_loop().create_future()

        async def work():
            try:
                await future
            except OSError as error:
                raise ValueError("the work has seen it") from error

        task = begin(work())
        future.set_exception(OSError("gone"))
        with pytest.raises(ValueError, match="has seen it"):
            await task

    asyncio.run(test())


def test_cancelled_task_closes_the_work():
    """So that its ``finally`` runs, and nothing is left that waits for the future."""
    closed = []

    async def test():
        future = asyncio.get_running_loop().create_future()

        async def work():
            try:
                await future
            finally:
                closed.append(True)

        task = begin(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]
        assert not future.cancelled()

    asyncio.run(test())
