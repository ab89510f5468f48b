# SPDX-License-Identifier: BSD-3-Clause
"""The error tree: who is what, what it says, and that it survives pickling whole."""

from __future__ import annotations

import copy
import pickle
import unittest

from tests import load

errors = load("_errors")


def samples() -> list[Exception]:
    """At least one error of each class, with every attribute away from its default."""
    transfer = {"bytes_done": 3, "bytes_total": 7, "destination_dirty": True, "keys": ("model.weight", "step")}
    return [
        errors.FtliteError("plain"),
        errors.StateError("not now", state="closed", attempted="send_checkpoint"),
        errors.DeadlineExceeded("fetching chunk 3", limit_s=2.5, elapsed_s=2.51, hint="give a longer timeout"),
        errors.UnsupportedOp("gloo has no alltoall", backend="gloo", op="alltoall"),
        errors.ChildError("child"),
        errors.ChildStartFailed("did not come up"),
        errors.ChildDied("pid 7 died of SIGKILL"),
        errors.RemoteFailure("ValueError in the child"),
        errors.ProtocolError("frame 99"),
        *(
            kind("moved badly", **transfer)
            for kind in (
                errors.TransferError,
                errors.NotServing,
                errors.IncompleteTransfer,
                errors.IntegrityError,
                errors.LayoutError,
            )
        ),
        errors.QuorumError("no agreement"),
    ]


class EveryError(unittest.TestCase):
    def test_no_class_lacks_a_sample(self) -> None:
        sampled = {type(error).__name__ for error in samples()}
        self.assertEqual(sampled, set(errors.__all__))

    def test_survives_pickling_and_copying(self) -> None:
        ways = [copy.copy, copy.deepcopy]
        ways += [
            lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ]
        for error in samples():
            for again in ways:
                with self.subTest(type(error).__name__):
                    twin = again(error)
                    self.assertIs(type(twin), type(error))
                    self.assertEqual(str(twin), str(error))
                    self.assertEqual(twin.args, error.args)
                    self.assertEqual(vars(twin), vars(error))

    def test_notes_survive_pickling(self) -> None:
        error = errors.LayoutError("shape")
        error.__dict__["__notes__"] = ["while healing"]  # what add_note does, from Python 3.11 on
        self.assertEqual(pickle.loads(pickle.dumps(error)).__notes__, ["while healing"])

    def test_a_subclass_of_a_host_survives_pickling(self) -> None:
        error = HostError(3)
        twin = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(twin), twin.rank, str(twin)), (HostError, 3, "rank 3 is gone"))

    def test_shows_its_attributes(self) -> None:
        for error in samples():
            for name, value in vars(error).items():
                with self.subTest(f"{type(error).__name__}.{name}"):
                    self.assertTrue(value, "the sample leaves the attribute at its default")


class HostError(errors.FtliteError):
    """A host's own subclass, whose constructor takes something else than the text."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank


class Tree(unittest.TestCase):
    def test_every_error_is_one_of_ours(self) -> None:
        for name in errors.__all__:
            self.assertTrue(issubclass(getattr(errors, name), errors.FtliteError), name)

    def test_each_is_also_the_builtin_that_callers_catch(self) -> None:
        builtin = {
            errors.DeadlineExceeded: TimeoutError,
            errors.UnsupportedOp: NotImplementedError,
            errors.ChildError: RuntimeError,
            errors.TransferError: OSError,
        }
        for kind, base in builtin.items():
            self.assertTrue(issubclass(kind, base), kind)

    def test_blame(self) -> None:
        kinds = {
            errors.ChildError: "ChildStartFailed ChildDied RemoteFailure ProtocolError",
            errors.TransferError: "NotServing IncompleteTransfer IntegrityError LayoutError",
        }
        for base, names in kinds.items():
            for name in names.split():
                self.assertTrue(issubclass(getattr(errors, name), base), name)

    def test_a_deadline_is_no_transfer_error(self) -> None:
        # both are an OSError; who catches a broken transfer must not swallow a timeout by it
        self.assertFalse(issubclass(errors.DeadlineExceeded, errors.TransferError))


class Texts(unittest.TestCase):
    def test_deadline(self) -> None:
        error = errors.DeadlineExceeded("fetching chunk 3", limit_s=2.5, elapsed_s=2.5123)
        self.assertEqual(str(error), "fetching chunk 3: gave up after 2.51 s (limit 2.5 s)")

    def test_deadline_with_a_hint(self) -> None:
        error = errors.DeadlineExceeded("waiting", limit_s=0, elapsed_s=0.00012, hint="is the donor up?")
        self.assertEqual(str(error), "waiting: gave up after 0.00012 s (limit 0 s); is the donor up?")

    def test_deadline_of_half_an_hour(self) -> None:
        error = errors.DeadlineExceeded("waiting", limit_s=1800, elapsed_s=1800.2)
        self.assertEqual(str(error), "waiting: gave up after 1800 s (limit 1800 s)")

    def test_the_message_is_the_text(self) -> None:
        self.assertEqual(str(errors.StateError("not now", state="closed")), "not now")
        self.assertEqual(str(errors.TransferError("moved badly", keys=("a",))), "moved badly")

    def test_transfer_defaults(self) -> None:
        error = errors.TransferError("moved badly")
        self.assertEqual(
            (error.bytes_done, error.bytes_total, error.destination_dirty, error.keys, error.errno),
            (0, 0, False, (), None),
        )


if __name__ == "__main__":
    unittest.main()
