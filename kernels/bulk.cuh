// Bulk copies from device to shared memory by the copy engine, and the barriers that count their bytes (from sm_90).
#pragma once
#include "common.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BULK_ASM(...) asm volatile(__VA_ARGS__)
#else
#define BULK_ASM(...)  // older devices never launch such kernels
#endif

typedef unsigned long long Barrier;  // in shared memory, 8-byte aligned

__device__ __forceinline__ void barrier_init(Barrier *barrier, int arrivals) {
    BULK_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// After the inits, before the copy engine is told of a barrier.
__device__ __forceinline__ void barrier_init_fence() {
    BULK_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
    BULK_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}
// One arrival, and so many bytes that copies still have to bring before the phase ends.
__device__ __forceinline__ void barrier_expect(Barrier *barrier, unsigned nbytes) {
    BULK_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(nbytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(Barrier *barrier, unsigned parity) {
    unsigned done = 0;
    while (!done)
        BULK_ASM("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
}
// Both addresses and nbytes are multiples of 16. `to` is read after a wait for the phase that counts the bytes.
__device__ __forceinline__ void bulk_copy(void *to, const void *from, unsigned nbytes, Barrier *barrier) {
    BULK_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
             ::"r"(shared_address(to)), "l"(from), "r"(nbytes), "r"(shared_address(barrier)) : "memory");
}
