"""Which errors tell of a failing accelerator: by the texts that libraries were seen to raise."""

import pytest
import torch
from torch.distributed import DistBackendError

from smalti.training.failures.faults import fault_of, is_fault
from smalti.training.failures.out_of_memory import is_out_of_memory
from smalti.types import World

NCCL = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.26.2
{}
Last error:
{}"""
UNHANDLED = (
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
)
FAULTS = {
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"): "CUDA error: an ",
    RuntimeError(
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k, &falpha, a,"
        " CUDA_R_16F, lda, b, CUDA_R_16F, ldb, &fbeta, c, CUDA_R_16F, ldc, CUDA_R_32F, CUBLAS_GEMM_DFALT_TENSOR_OP)`"
    ): "CUBLAS_STATUS_EXECUTION_FAILED",
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"): "CUDNN_STATUS_EXECUTION_FAILED",
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR\nYou can try to repro this exception using the following code snippet."
    ): "CUDNN_STATUS_INTERNAL_ERROR",
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"): "an illegal memory access",
    DistBackendError(NCCL.format(*UNHANDLED, "Cuda failure 999 'unknown error'")): "unknown error",
    DistBackendError(NCCL.format(*UNHANDLED, "Cuda failure 700 'an illegal memory access was encountered'")): "illegal memory",
    DistBackendError(NCCL.format(*UNHANDLED, "Cuda failure 'uncorrectable ECC error encountered'")): "uncorrectable ECC error",
}
NO_FAULTS = [
    DistBackendError(NCCL.format(*UNHANDLED, "Cuda failure 1 'invalid argument'")),
    DistBackendError(
        NCCL.format(
            "remote process exited or there was a network error",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            "socketProgress: Connection closed by remote peer ng30903-ib<51159>",
        )
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."),
    RuntimeError(
        "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda,"
    ),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    ValueError("CUDNN_STATUS_EXECUTION_FAILED"),
]
NO_ROOM = [
    DistBackendError(NCCL.format(*UNHANDLED, "Cuda failure 2 'out of memory'")),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize(("error", "words"), FAULTS.items(), ids=str)
def test_a_failing_device_is_known_by_what_libraries_say(error, words):
    assert is_fault(error)
    told = fault_of(error, World(device="cuda:3")).message
    assert words in told
    assert "\n" not in told


@pytest.mark.parametrize("error", NO_FAULTS, ids=str)
def test_wrong_arguments_and_what_other_ranks_do_are_no_fault_of_the_device(error):
    assert not is_fault(error)


@pytest.mark.parametrize("error", NO_ROOM, ids=str)
def test_libraries_without_room_are_out_of_memory_and_no_fault(error):
    assert is_out_of_memory(error)
    assert not is_fault(error)
