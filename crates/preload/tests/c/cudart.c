// A CUDA runtime for tests, over the driver library that the loader finds. Its own allocations are host memory.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Thread_local int device = 0;
static _Thread_local int current = -1;
static int live = 0;
static int calls = 0;

enum { FREE, HELD_NEXT, HELD };
static int hold = FREE;

// Counts a call. One that is to be held waits here.
static void begin(void) {
    __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    int next = HELD_NEXT;
    if (!__atomic_compare_exchange_n(&hold, &next, HELD, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return;
    while (__atomic_load_n(&hold, __ATOMIC_SEQ_CST) == HELD) usleep(1000);
}

static void *symbol(const char *name) {
    static void *library = NULL;
    if (library == NULL) library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = library == NULL ? NULL : dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "no %s: %s\n", name, dlerror());
        abort();
    }
    return found;
}

static int make_current(void) {
    if (current == device) return 0;
    int code = ((int (*)(unsigned))symbol("cuInit"))(0);
    int handle = 0;
    void *context = NULL;
    if (code == 0) code = ((int (*)(int *, int))symbol("cuDeviceGet"))(&handle, device);
    if (code == 0) code = ((int (*)(void **, int))symbol("cuDevicePrimaryCtxRetain"))(&context, handle);
    if (code == 0) code = ((int (*)(void *))symbol("cuCtxSetCurrent"))(context);
    if (code == 0) current = device;
    return code;
}

int cudaSetDevice(int number) {
    device = number;
    return 0;
}

int cudaGetDevice(int *number) {
    begin();
    *number = device;
    return 0;
}

int cudaMalloc(void **out, size_t bytes) {
    begin();
    int code = make_current();
    if (code != 0) return code;
    *out = bytes == 0 ? NULL : malloc(bytes);
    __atomic_add_fetch(&live, bytes != 0, __ATOMIC_SEQ_CST);
    return 0;
}

int cudaFree(void *pointer) {
    begin();
    int code = make_current();
    if (code != 0) return code;
    __atomic_sub_fetch(&live, pointer != NULL, __ATOMIC_SEQ_CST);
    free(pointer);
    return 0;
}

int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    (void)kind;
    memcpy(to, from, bytes);
    return 0;
}

int cudaDeviceSynchronize(void) {
    int code = make_current();
    return code != 0 ? code : ((int (*)(void))symbol("cuCtxSynchronize"))();
}

int cudaMemGetInfo(size_t *available, size_t *total) {
    int code = make_current();
    return code != 0 ? code : ((int (*)(size_t *, size_t *))symbol("cuMemGetInfo_v2"))(available, total);
}

// Allocations that reached this library and were not freed.
int test_live(void) {
    return __atomic_load_n(&live, __ATOMIC_SEQ_CST);
}

int test_calls(void) {
    return __atomic_load_n(&calls, __ATOMIC_SEQ_CST);
}

// Holds the next call, until this is called again.
void test_hold(int is_held) {
    __atomic_store_n(&hold, is_held ? HELD_NEXT : FREE, __ATOMIC_SEQ_CST);
}

int test_is_held(void) {
    return __atomic_load_n(&hold, __ATOMIC_SEQ_CST) == HELD;
}
