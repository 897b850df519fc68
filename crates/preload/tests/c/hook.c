// A library that is loaded before ours, and passes calls on to what comes behind it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

int hook_calls = 0;

int cudaMalloc(void **out, size_t bytes) {
    hook_calls++;
    int code = ((int (*)(void **, size_t))dlsym(RTLD_NEXT, "cudaMalloc"))(out, bytes);
    return code == 0 && *out == NULL ? -1 : code;
}
