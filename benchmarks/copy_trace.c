// Counts host-to-device copies independently of ggufd: the driver loads this at cuInit (CUDA_INJECTION64_PATH), and
// CUPTI reports every copy the device carried out, whoever submitted it and however (graphs too).
//
// COPY_TRACE_FILE names the file that holds "<host-to-device bytes> <copies>\n", rewritten twenty times a second.
// Build: cc -shared -fPIC -o copy_trace.so copy_trace.c -lpthread -ldl. CUPTI is looked up at run time
// (COPY_TRACE_CUPTI, else libcupti.so.13), so no header and no library is needed to build.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { KIND_MEMCPY = 1, HOST_TO_DEVICE = 1, BUFFER_NBYTES = 1 << 20 };

// The beginning of every version of CUPTI's memory copy record.
typedef struct { uint32_t kind; uint8_t copy_kind, source_kind, target_kind, flags; uint64_t bytes; } Copy;

typedef void (*Request)(uint8_t**, size_t*, size_t*);
typedef void (*Complete)(void*, uint32_t, uint8_t*, size_t, size_t);
static int (*register_callbacks)(Request, Complete);
static int (*enable)(int);
static int (*next_record)(uint8_t*, size_t, void**);
static int (*flush_all)(uint32_t);
static uint64_t bytes, copies;
static int file = -1;

static void request(uint8_t** buffer, size_t* size, size_t* most) { *buffer = aligned_alloc(8, BUFFER_NBYTES); *size = BUFFER_NBYTES; *most = 0; }

static void complete(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid) {
    (void)context; (void)stream; (void)size;
    void* record = 0;
    while (next_record(buffer, valid, &record) == 0) {
        const Copy* copy = record;
        if (copy->kind == KIND_MEMCPY && copy->copy_kind == HOST_TO_DEVICE) {
            __atomic_add_fetch(&bytes, copy->bytes, __ATOMIC_RELAXED);
            __atomic_add_fetch(&copies, 1, __ATOMIC_RELAXED);
        }
    }
    free(buffer);
}

static void* report(void* unused) {
    (void)unused;
    for (;;) {
        flush_all(0);
        char line[64];
        int n = snprintf(line, sizeof line, "%20llu %12llu\n", (unsigned long long)bytes, (unsigned long long)copies);
        if (pwrite(file, line, n, 0) != n) return 0;
        usleep(50000);
    }
}

int InitializeInjection(void) {
    const char* name = getenv("COPY_TRACE_CUPTI");
    void* cupti = dlopen(name ? name : "libcupti.so.13", RTLD_NOW);
    const char* path = getenv("COPY_TRACE_FILE");
    if (!cupti || !path) { fprintf(stderr, "copy_trace: %s\n", cupti ? "COPY_TRACE_FILE is not set" : dlerror()); return 0; }
    *(void**)&register_callbacks = dlsym(cupti, "cuptiActivityRegisterCallbacks");
    *(void**)&enable = dlsym(cupti, "cuptiActivityEnable");
    *(void**)&next_record = dlsym(cupti, "cuptiActivityGetNextRecord");
    *(void**)&flush_all = dlsym(cupti, "cuptiActivityFlushAll");
    file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    pthread_t thread;
    if (file < 0 || !register_callbacks || !enable || !next_record || !flush_all) return 0;
    if (register_callbacks(request, complete) || enable(KIND_MEMCPY)) { fprintf(stderr, "copy_trace: CUPTI refuses\n"); return 0; }
    return pthread_create(&thread, 0, report, 0) == 0;
}
