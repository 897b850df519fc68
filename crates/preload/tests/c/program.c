// Scenes for the preload library, as a program sees it that knows the CUDA runtime only. The first argument names one.
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaSetDevice(int);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaDeviceSynchronize(void);
int cudaMemGetInfo(size_t *, size_t *);
int test_live(void), test_calls(void), test_is_held(void);
void test_hold(int);

#define MIB ((size_t)1 << 20)

static int (*tms_pause)(const char *), (*tms_resume)(const char *);
static void (*tms_set_current_tag)(const char *);
static const char *(*tms_get_current_tag)(void);
static void (*tms_set_interesting_region)(bool), (*tms_set_enable_cpu_backup)(bool), (*tms_set_enable_disk_backup)(bool);
static bool (*tms_get_interesting_region)(void), (*tms_get_enable_cpu_backup)(void), (*tms_get_enable_disk_backup)(void);
static int (*tms_set_cpu_backup_backend)(const char *), (*tms_set_disk_backup_dir)(const char *);
static const char *(*tms_get_cpu_backup_backend)(void);
static void (*set_memory_margin_bytes)(uint64_t), (*tms_set_retain_cpu_backup)(bool);
static bool (*tms_get_retain_cpu_backup)(void);
static uint8_t *(*tms_get_cpu_backup_pointer)(const uint8_t *, uint64_t);
static int (*poorwill_tms_set_unused)(const uint64_t *, size_t);
static int (*poorwill_tms_report)(char *, size_t);
static uint64_t (*poorwill_tms_owns)(const void *);
static const char *(*poorwill_tms_last_error)(void), *(*poorwill_tms_last_message)(void);

#define CHECK(what)                                                                                                  \
    do {                                                                                                             \
        if (!(what)) {                                                                                               \
            const char *error = poorwill_tms_last_error == NULL ? "" : poorwill_tms_last_error();                    \
            fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #what, error);               \
            _exit(1);                                                                                                \
        }                                                                                                            \
    } while (0)

static void load(void) {
#define LOAD(name) CHECK((*(void **)(&name) = dlsym(RTLD_DEFAULT, #name)) != NULL)
    LOAD(poorwill_tms_last_error);
    LOAD(poorwill_tms_last_message);
    LOAD(tms_pause);
    LOAD(tms_resume);
    LOAD(tms_set_current_tag);
    LOAD(tms_get_current_tag);
    LOAD(tms_set_interesting_region);
    LOAD(tms_get_interesting_region);
    LOAD(tms_set_enable_cpu_backup);
    LOAD(tms_get_enable_cpu_backup);
    LOAD(tms_set_enable_disk_backup);
    LOAD(tms_get_enable_disk_backup);
    LOAD(tms_set_cpu_backup_backend);
    LOAD(tms_get_cpu_backup_backend);
    LOAD(tms_set_disk_backup_dir);
    LOAD(set_memory_margin_bytes);
    LOAD(tms_set_retain_cpu_backup);
    LOAD(tms_get_retain_cpu_backup);
    LOAD(tms_get_cpu_backup_pointer);
    LOAD(poorwill_tms_set_unused);
    LOAD(poorwill_tms_report);
    LOAD(poorwill_tms_owns);
}

static uint8_t byte_of(uint64_t seed, size_t at) {
    uint64_t mixed = (seed + 1) * 0x9E3779B97F4A7C15u + (at >> 3) * 0xD1B54A32D192ED03u;
    mixed ^= mixed >> 29;
    return (uint8_t)(mixed >> (8 * (at & 7)));
}

static uint8_t *loaded(size_t bytes, uint64_t seed) {
    void *block = NULL;
    CHECK(cudaMalloc(&block, bytes) == 0 && block != NULL);
    CHECK((uintptr_t)block % 256 == 0);
    for (size_t at = 0; at < bytes; at++) ((uint8_t *)block)[at] = byte_of(seed, at);
    return block;
}

static bool has(const uint8_t *block, size_t bytes, uint64_t seed) {
    for (size_t at = 0; at < bytes; at++)
        if (block[at] != byte_of(seed, at)) return false;
    return true;
}

static size_t available(void) {
    size_t free_bytes = 0, total_bytes = 0;
    CHECK(cudaMemGetInfo(&free_bytes, &total_bytes) == 0);
    return free_bytes;
}

static size_t available_on(int device) {
    CHECK(cudaSetDevice(device) == 0);
    return available();
}

static const char *report(void) {
    static char text[1 << 16];
    int length = poorwill_tms_report(text, sizeof text);
    CHECK(length > 0 && (size_t)length < sizeof text && strlen(text) == (size_t)length);
    char cut[8];
    CHECK(poorwill_tms_report(cut, sizeof cut) == length && strlen(cut) == 7 && strncmp(cut, text, 7) == 0);
    CHECK(poorwill_tms_report(NULL, 0) == length);
    return text;
}

// TMS_INIT_ENABLE and TMS_INIT_ENABLE_CPU_BACKUP are set.
static void cycle(void) {
    CHECK(tms_get_interesting_region() && tms_get_enable_cpu_backup() && !tms_get_enable_disk_backup());
    CHECK(strcmp(tms_get_current_tag(), "default") == 0 && strcmp(tms_get_cpu_backup_backend(), "pinned") == 0);
    CHECK(tms_pause(NULL) == 0 && tms_resume(NULL) == 0);
    size_t before = available();
    const size_t sizes[] = {1, 512, 700, 2 * MIB, 3 * MIB + 5, 20 * MIB, 64 * MIB};
    enum { COUNT = sizeof sizes / sizeof *sizes };
    uint8_t *blocks[COUNT];
    for (int i = 0; i < COUNT; i++) blocks[i] = loaded(sizes[i], i);
    CHECK(test_live() == 0);
    CHECK(poorwill_tms_owns(blocks[5] + 3) == 20 * MIB - 3 && poorwill_tms_owns(&before) == 0);
    CHECK(available() + 89 * MIB <= before);
    for (int turn = 0; turn < 3; turn++) {
        CHECK(tms_pause(turn == 1 ? "" : NULL) == 0);
        CHECK(available() == before);
        CHECK(strstr(report(), "\"pause\":[{\"device\":0") != NULL);
        CHECK(tms_pause("default") == 0 && strstr(poorwill_tms_last_message(), "paused before") != NULL);
        CHECK(tms_resume(NULL) == 0);
        CHECK(strstr(report(), "\"resume\":[{\"device\":0") != NULL);
        CHECK(tms_resume("default") == 0 && strstr(poorwill_tms_last_message(), "active before") != NULL);
        for (int i = 0; i < COUNT; i++) CHECK(has(blocks[i], sizes[i], i + (i == 5 ? 100 * turn : 0)));
        for (size_t at = 0; at < sizes[5]; at++) blocks[5][at] = byte_of(5 + 100 * (turn + 1), at);
    }
    CHECK(tms_pause("another tag") == 0 && has(blocks[6], sizes[6], 6));
    CHECK(tms_pause(NULL) == 0);
    CHECK(cudaFree(blocks[6]) == 0 && cudaFree(blocks[0]) == 0);
    CHECK(tms_resume(NULL) == 0);
    for (int i = 1; i < COUNT - 1; i++) CHECK(has(blocks[i], sizes[i], i + (i == 5 ? 300 : 0)));
    for (int i = 1; i < COUNT - 1; i++) CHECK(cudaFree(blocks[i]) == 0);
    CHECK(available() == before);
    // Not ours: the runtime's.
    CHECK(cudaFree(NULL) == 0);
    void *none = &none;
    CHECK(cudaMalloc(&none, 0) == 0 && none == NULL);
    tms_set_interesting_region(false);
    void *other = NULL;
    CHECK(cudaMalloc(&other, 100) == 0 && test_live() == 1);
    CHECK(tms_pause(NULL) == 0 && tms_resume(NULL) == 0);
    tms_set_interesting_region(true);
    CHECK(cudaFree(other) == 0 && test_live() == 0);
}

/* A pause that lends leaves memory in use, and a resume finds it. */
static void lending(void) {
    size_t before = available();
    uint8_t *large = loaded(64 * MIB, 1), *small = loaded(2 * MIB, 2);
    for (int turn = 0; turn < 2; turn++) {
        CHECK(tms_pause(NULL) == 0 && available() == before - 64 * MIB);
        CHECK(strstr(report(), "\"lent_bytes\":67108864") != NULL);
        CHECK(tms_resume(NULL) == 0);
        CHECK(strstr(report(), "\"returned_bytes\":67108864") != NULL);
        CHECK(has(large, 64 * MIB, 1) && has(small, 2 * MIB, 2));
    }
    CHECK(cudaFree(large) == 0 && cudaFree(small) == 0 && available() == before);
}

static void not_lending(void) {
    size_t before = available();
    uint8_t *large = loaded(16 * MIB, 1);
    for (int turn = 0; turn < 2; turn++) {
        CHECK(tms_pause(NULL) == 0 && available() == before && tms_resume(NULL) == 0);
        CHECK(has(large, 16 * MIB, 1));
    }
}

static uint8_t *loaded_as(const char *tag, const char *kind, size_t bytes, uint64_t seed) {
    tms_set_interesting_region(true);
    tms_set_current_tag(tag);
    tms_set_enable_disk_backup(strcmp(kind, "disk") == 0);
    bool is_cpu = strcmp(kind, "pinned") == 0 || strcmp(kind, "mmap") == 0;
    tms_set_enable_cpu_backup(is_cpu);
    if (is_cpu) CHECK(tms_set_cpu_backup_backend(kind) == 0);
    return loaded(bytes, seed);
}

static void kinds(void) {
    CHECK(!tms_get_interesting_region());
    CHECK(tms_set_disk_backup_dir(getenv("TEST_FOLDER")) == 0);
    size_t bytes = 6 * MIB;
    uint8_t *dropped = loaded_as("kv", "none", bytes, 1), *pinned = loaded_as("weights", "pinned", bytes, 2);
    uint8_t *mapped = loaded_as("weights", "mmap", bytes, 3), *on_disk = loaded_as("moments", "disk", bytes, 4);
    size_t in_use = available();
    CHECK(tms_set_disk_backup_dir(getenv("TEST_FOLDER")) == 0 && tms_set_disk_backup_dir("/elsewhere") == 1);
    CHECK(strstr(poorwill_tms_last_error(), "/elsewhere") != NULL);
    CHECK(tms_set_cpu_backup_backend("paper") == 1 && tms_set_cpu_backup_backend(NULL) == 1);
    CHECK(tms_get_cpu_backup_pointer(pinned, bytes) == NULL && tms_get_cpu_backup_pointer(dropped, bytes) == NULL);
    CHECK(tms_get_cpu_backup_pointer((uint8_t *)&bytes, 1) == NULL && poorwill_tms_last_error()[0] != 0);
    CHECK(tms_pause("kv") == 0);
    CHECK(available() == in_use + bytes && has(pinned, bytes, 2));
    CHECK(tms_pause(NULL) == 0);
    CHECK(available() == in_use + 4 * bytes);
    CHECK(strstr(report(), "\"spilled_bytes\":6291456") != NULL);
    const uint8_t *backup = tms_get_cpu_backup_pointer(pinned, bytes);
    CHECK(backup != NULL && has(backup, bytes, 2) && tms_get_cpu_backup_pointer(pinned + MIB, 5) == backup + MIB);
    CHECK(has(tms_get_cpu_backup_pointer(mapped, bytes), bytes, 3));
    CHECK(tms_get_cpu_backup_pointer(pinned + MIB, bytes) == NULL);
    CHECK(tms_get_cpu_backup_pointer(on_disk, bytes) == NULL && tms_get_cpu_backup_pointer(dropped, bytes) == NULL);
    CHECK(tms_resume("weights") == 0 && has(pinned, bytes, 2) && has(mapped, bytes, 3));
    CHECK(tms_resume(NULL) == 0 && has(on_disk, bytes, 4));
    dropped[0] = 1;
    CHECK(tms_pause(NULL) == 0);
    // The backup of `pinned` was kept, that of `mapped` was not, and that on disk was.
    CHECK(strstr(report(), "\"copied_bytes\":6291456,\"stored_bytes\":6291456,\"unchanged_bytes\":6291456,") != NULL);
    CHECK(strstr(report(), "\"copied_bytes\":0,\"stored_bytes\":0,\"unchanged_bytes\":6291456,") != NULL);
    tms_set_retain_cpu_backup(true);
    CHECK(tms_get_retain_cpu_backup());
    CHECK(tms_resume(NULL) == 0 && strstr(report(), "\"released_host_bytes\":0") != NULL);
    CHECK(has(tms_get_cpu_backup_pointer(mapped, bytes), bytes, 3));
    // Retained.
    CHECK(tms_pause(NULL) == 0);
    CHECK(strstr(report(), "\"copied_bytes\":0,\"stored_bytes\":0,\"unchanged_bytes\":12582912,") != NULL);
    CHECK(tms_resume(NULL) == 0);
    CHECK(has(pinned, bytes, 2) && has(mapped, bytes, 3) && has(on_disk, bytes, 4));
    tms_set_enable_cpu_backup(true);
    tms_set_enable_disk_backup(true);
    void *both = NULL;
    CHECK(cudaMalloc(&both, 100) == 1 && both == NULL);
    CHECK(cudaFree(dropped) == 0 && cudaFree(pinned) == 0 && cudaFree(mapped) == 0 && cudaFree(on_disk) == 0);
    CHECK(available() == in_use + 4 * bytes);
}

static void nested(void) {
    size_t bytes = 3 * MIB;
    uint8_t *first = loaded_as("a", "pinned", bytes, 1), *other = loaded_as("b", "pinned", bytes, 2);
    CHECK(tms_pause("a") == 0 && has(other, bytes, 2));
    // Memory that comes while its tag is paused is active, until the next pause.
    uint8_t *second = loaded_as("a", "pinned", bytes, 3);
    CHECK(has(second, bytes, 3));
    CHECK(tms_pause("a") == 0);
    uint8_t *third = loaded_as("a", "pinned", bytes, 4);
    CHECK(tms_resume("a") == 0);
    CHECK(has(first, bytes, 1) && has(second, bytes, 3) && has(third, bytes, 4) && has(other, bytes, 2));
    // Names that are none of Poorwill's.
    uint8_t *odd = loaded_as("a tag / with \xc3\xbc, and so on", "pinned", bytes, 5);
    uint8_t *odder = loaded_as("another tag / with \xc3\xbc, and so on", "pinned", bytes, 6);
    CHECK(tms_pause("a tag / with \xc3\xbc, and so on") == 0 && has(odder, bytes, 6));
    CHECK(tms_pause(NULL) == 0 && tms_resume(NULL) == 0 && has(odd, bytes, 5) && has(odder, bytes, 6));
    uint8_t *all[] = {first, other, second, third, odd, odder};
    for (int i = 0; i < 6; i++) CHECK(cudaFree(all[i]) == 0);
}

// Parts of a tag on two devices, and more tags than anyone reads of.
static void notes(void) {
    enum { TAGS = 110 };
    uint8_t *blocks[6], *more[TAGS];
    for (int device = 0; device < 2; device++) {
        CHECK(cudaSetDevice(device) == 0);
        blocks[3 * device] = loaded_as("a", "pinned", 100, 1);
        blocks[3 * device + 1] = loaded_as("a", "none", 100, 1);
        blocks[3 * device + 2] = loaded_as("b", "pinned", 100, 1);
    }
    CHECK(tms_pause("a") == 0 && tms_pause(NULL) == 0 && tms_resume("b") == 0);
    CHECK(tms_resume(NULL) == 0 && tms_resume(NULL) == 0);
    CHECK(poorwill_tms_last_message()[0] == 0);
    for (int turn = 0; turn < 4; turn++) {
        CHECK(tms_pause(turn % 2 ? "a" : NULL) == 0 && tms_pause("a") == 0);
        CHECK(strstr(poorwill_tms_last_message(), "memory of `a` had been paused before") != NULL);
        CHECK(tms_resume(turn < 2 ? "a" : NULL) == 0 && tms_resume("a") == 0);
        CHECK(strstr(poorwill_tms_last_message(), "memory of `a` had been active before") != NULL);
    }
    CHECK(tms_resume(NULL) == 0);
    char tag[20];
    for (int i = 0; i < TAGS; i++) {
        snprintf(tag, sizeof tag, "tag %d", i);
        more[i] = loaded_as(tag, "none", 100, 1);
        CHECK(tms_resume(tag) == 0 && strstr(poorwill_tms_last_message(), tag) != NULL);
    }
    for (int i = 0; i < TAGS; i++) CHECK(cudaFree(more[i]) == 0);
    for (int i = 0; i < 6; i++) CHECK(cudaFree(blocks[i]) == 0);
}

static void views(void) {
    enum { CALLS = 20000 };
    size_t bytes = 4 * MIB;
    uint8_t *first = loaded_as("a", "pinned", bytes, 1), *second = loaded_as("a", "pinned", bytes, 2);
    tms_set_retain_cpu_backup(true);
    CHECK(tms_pause(NULL) == 0);
    const uint8_t *of_first = tms_get_cpu_backup_pointer(first, bytes);
    CHECK(has(of_first, bytes, 1) && has(tms_get_cpu_backup_pointer(second, bytes), bytes, 2));
    size_t before_bytes = mallinfo2().uordblks;
    for (size_t i = 0; i < CALLS; i++)
        CHECK(tms_get_cpu_backup_pointer(first + i % 8, bytes - 8) == of_first + i % 8);
    CHECK(mallinfo2().uordblks < before_bytes + 16 * CALLS);
    // What comes to the same address has no backup yet.
    CHECK(tms_resume(NULL) == 0 && has(tms_get_cpu_backup_pointer(first, bytes), bytes, 1));
    CHECK(cudaFree(first) == 0);
    CHECK(tms_get_cpu_backup_pointer(first, bytes) == NULL);
    uint8_t *third = loaded_as("a", "pinned", bytes, 3);
    CHECK(third == first && tms_get_cpu_backup_pointer(third, bytes) == NULL);
    CHECK(tms_pause(NULL) == 0 && has(tms_get_cpu_backup_pointer(third, bytes), bytes, 3));
    CHECK(tms_resume(NULL) == 0 && cudaFree(second) == 0 && cudaFree(third) == 0);
}

static void *work(void *number) {
    uint64_t seed = (uintptr_t)number;
    CHECK(!tms_get_interesting_region() && strcmp(tms_get_current_tag(), "default") == 0);
    for (int turn = 0; turn < 50; turn++) {
        size_t bytes = (turn % 5 + 1) * MIB / 2 + seed;
        uint8_t *block = loaded_as("mine", "pinned", bytes, seed + turn);
        CHECK(has(block, bytes, seed + turn));
        CHECK(cudaFree(block) == 0);
    }
    return NULL;
}

static void threads(void) {
    uint8_t *block = loaded_as("theirs", "pinned", 5 * MIB, 7);
    pthread_t all[4];
    for (uintptr_t i = 0; i < 4; i++) CHECK(pthread_create(&all[i], NULL, work, (void *)i) == 0);
    for (int turn = 0; turn < 20; turn++) {
        CHECK(tms_pause("theirs") == 0 && tms_resume("theirs") == 0);
        CHECK(has(block, 5 * MIB, 7));
    }
    for (int i = 0; i < 4; i++) CHECK(pthread_join(all[i], NULL) == 0);
    CHECK(cudaFree(block) == 0);
}

static void unused(void) {
    uint8_t *block = loaded_as("a", "pinned", 12 * MIB, 1);
    const uint64_t pairs[] = {(uintptr_t)block + 2 * MIB, 6 * MIB, 0, 5};
    CHECK(poorwill_tms_set_unused(pairs, 2) == 0);
    CHECK(tms_pause(NULL) == 0 && strstr(report(), "\"unused_bytes\":6291456") != NULL);
    CHECK(tms_resume(NULL) == 0);
    CHECK(has(block, 2 * MIB, 1));
    for (size_t at = 8 * MIB; at < 12 * MIB; at++) CHECK(block[at] == byte_of(1, at));
    CHECK(tms_pause(NULL) == 0 && strstr(report(), "\"unused_bytes\":0") != NULL);
    CHECK(tms_resume(NULL) == 0);
    const uint64_t wrong[] = {UINT64_MAX, 2};
    CHECK(poorwill_tms_set_unused(wrong, 1) == 0 && tms_pause(NULL) == 1);
    CHECK(has(block, 2 * MIB, 1) && tms_pause(NULL) == 0 && tms_resume(NULL) == 0);
    CHECK(poorwill_tms_set_unused(NULL, 1) == 1 && poorwill_tms_set_unused(NULL, 0) == 0);
    CHECK(cudaFree(block) == 0);
}

static void limits(void) {
    uint8_t *block = loaded_as("a", "none", 2 * MIB, 1);
    size_t before = available();
    void *more = NULL;
    CHECK(cudaMalloc(&more, before + 2 * MIB) == 2 && more == NULL && poorwill_tms_last_error()[0] != 0);
    CHECK(cudaMalloc(&more, SIZE_MAX - 5) == 2 && more == NULL);
    CHECK(cudaMalloc(&more, before) == 0 && available() == 0);
    void *last = NULL;
    CHECK(cudaMalloc(&last, 2 * MIB) == 2);
    CHECK(cudaFree(more) == 0 && available() == before);
    set_memory_margin_bytes(before - 4 * MIB);
    CHECK(cudaMalloc(&more, 6 * MIB) == 2 && strstr(poorwill_tms_last_error(), "margin") != NULL);
    CHECK(cudaMalloc(&more, 3 * MIB) == 0 && cudaFree(more) == 0);
    set_memory_margin_bytes(0);
    CHECK(cudaMalloc(&more, 6 * MIB) == 0 && cudaFree(more) == 0 && cudaFree(block) == 0);
}

static void *frees_soon(void *block) {
    usleep(200 * 1000);
    return (void *)(uintptr_t)cudaFree(block);
}

static void waits(void) {
    uint8_t *block = loaded_as("a", "pinned", 8 * MIB, 1);
    CHECK(tms_pause("a") == 0);
    tms_set_interesting_region(false);
    void *taken = NULL, *freed = NULL;
    CHECK(cudaMalloc(&taken, available() - 4 * MIB) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, frees_soon, taken) == 0);
    CHECK(tms_resume("a") == 0 && has(block, 8 * MIB, 1));
    CHECK(pthread_join(thread, &freed) == 0 && freed == NULL && cudaFree(block) == 0);
}

// TMS_INIT_ENABLE is no boolean.
static void environment(void) {
    void *block = NULL;
    CHECK(cudaMalloc(&block, 100) == 1 && block == NULL);
    CHECK(strstr(poorwill_tms_last_error(), "TMS_INIT_ENABLE") != NULL);
    CHECK(cudaMalloc(&block, 100) == 1 && !tms_get_interesting_region());
    tms_set_interesting_region(false);
    CHECK(cudaMalloc(&block, 100) == 0 && test_live() == 1 && cudaFree(block) == 0);
    CHECK(tms_pause(NULL) == 0 && tms_resume(NULL) == 0);
}

static void forks(void) {
    uint8_t *block = loaded_as("a", "pinned", 4 * MIB, 1);
    for (int turn = 0; turn < 2; turn++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            void *more = NULL;
            int calls = test_calls();
            CHECK(cudaMalloc(&more, 100) == 3 && more == NULL);
            CHECK(strstr(poorwill_tms_last_error(), "fork") != NULL);
            CHECK(cudaFree(block) == 3 && strstr(poorwill_tms_last_error(), "fork") != NULL);
            CHECK(test_calls() == calls);
            CHECK(tms_pause(NULL) == 3 && tms_resume(NULL) == 3 && poorwill_tms_owns(block) == 0);
            CHECK(poorwill_tms_report(NULL, 0) == -1);
            _exit(0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(tms_pause(NULL) == 0 && tms_resume(NULL) == 0 && has(block, 4 * MIB, 1));
    }
    CHECK(cudaFree(block) == 0);
}

static void *allocates(void *out) {
    tms_set_interesting_region(true);
    return (void *)(uintptr_t)cudaMalloc(out, 100);
}

// The first allocation is under way in another thread.
static void forks_early(void) {
    void *block = NULL, *failed = NULL;
    pthread_t thread;
    test_hold(true);
    CHECK(pthread_create(&thread, NULL, allocates, &block) == 0);
    while (!test_is_held()) usleep(1000);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        int calls = test_calls();
        CHECK(allocates(&block) == (void *)3 && block == NULL && test_calls() == calls);
        CHECK(tms_pause(NULL) == 3);
        tms_set_interesting_region(false);
        CHECK(cudaFree(NULL) == 0 && test_calls() == calls + 1);
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    test_hold(false);
    CHECK(pthread_join(thread, &failed) == 0 && failed == NULL && cudaFree(block) == 0);
}

// POORWILL_COMPRESS is no value of it, so there is no memory that a child could lack.
static void forks_without_memory(void) {
    void *block = NULL;
    tms_set_interesting_region(true);
    CHECK(cudaMalloc(&block, 100) == 1 && strstr(poorwill_tms_last_error(), "POORWILL_COMPRESS") != NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(tms_pause(NULL) == 0 && tms_resume(NULL) == 0 && poorwill_tms_report(NULL, 0) > 0);
        tms_set_retain_cpu_backup(true);
        CHECK(tms_get_retain_cpu_backup());
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Two devices; calls of the driver fail in turn.
static void failures(void) {
    void (*arm)(uint64_t, uint64_t) = NULL;
    uint64_t (*disarm)(void) = NULL;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library != NULL);
    *(void **)&arm = dlsym(library, "poorwillFakeArm");
    *(void **)&disarm = dlsym(library, "poorwillFakeDisarm");
    CHECK(arm != NULL && disarm != NULL);
    size_t bytes = 3 * MIB;
    uint8_t *blocks[4];
    for (int i = 0; i < 4; i++) {
        CHECK(cudaSetDevice(i % 2) == 0);
        blocks[i] = loaded_as(i < 2 ? "a" : "b", i < 2 ? "pinned" : "mmap", bytes, i);
    }
    // One call in so many fails. Each block has its turn, since the numbers of both have no common divisor.
    const char *effort = getenv("POORWILL_EFFORT");
    uint64_t stride = effort != NULL && strcmp(effort, "quick") == 0 ? 5 : 1;
    int failed = 0;
    for (uint64_t first = 0;; first += stride) {
        arm(first, 1);
        int paused = tms_pause(NULL);
        uint64_t calls = disarm();
        if (paused != 0) {
            failed++;
            CHECK(poorwill_tms_last_error()[0] != 0);
            for (int i = 0; i < 4; i++) CHECK(has(blocks[i], bytes, i));
            CHECK(tms_pause(NULL) == 0);
        }
        size_t asleep_bytes = available_on(0) + available_on(1);
        arm(first, 1);
        int resumed = tms_resume(NULL);
        uint64_t more = disarm();
        if (resumed != 0) {
            failed++;
            // A resume that fails has resumed nothing.
            CHECK(available_on(0) + available_on(1) == asleep_bytes);
            CHECK(tms_resume(NULL) == 0);
        }
        for (int i = 0; i < 4; i++) CHECK(has(blocks[i], bytes, i));
        // So that the next pause copies again.
        blocks[first % 4][5] ^= 1;
        blocks[first % 4][5] ^= 1;
        if (first >= calls && first >= more) break;
    }
    CHECK(failed > (stride == 1 ? 10 : 3));
    for (int i = 0; i < 4; i++) CHECK(cudaFree(blocks[i]) == 0);
}

// A call of the driver fails, maybe here. What failed and what did not is as it says.
static void resume_fails(void) {
    size_t bytes = 3 * MIB;
    void *block = NULL;
    tms_set_interesting_region(true);
    tms_set_enable_cpu_backup(true);
    CHECK(tms_set_cpu_backup_backend("mmap") == 0);
    size_t before_bytes = available();
    if (cudaMalloc(&block, bytes) != 0) return;
    for (size_t at = 0; at < bytes; at++) ((uint8_t *)block)[at] = byte_of(1, at);
    if (tms_pause(NULL) != 0) return;
    CHECK(available() == before_bytes);
    bool is_resumed = tms_resume(NULL) == 0;
    CHECK(is_resumed == (available() < before_bytes));
    if (!is_resumed) return;
    CHECK(has(block, bytes, 1) && strstr(report(), "\"resume\":[{\"device\":0") != NULL);
    fprintf(stderr, "resumed\n");
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    load();
    const struct {
        const char *name;
        void (*run)(void);
    } scenes[] = {
        {"cycle", cycle},     {"lending", lending}, {"not_lending", not_lending}, {"kinds", kinds},   {"nested", nested},           {"threads", threads}, {"notes", notes}, {"resume_fails", resume_fails}, {"views", views}, {"unused", unused},
        {"limits", limits},   {"waits", waits},   {"forks", forks}, {"forks_early", forks_early}, {"forks_without_memory", forks_without_memory}, {"environment", environment}, {"failures", failures},
    };
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        if (strcmp(arguments[1], scenes[i].name) == 0) {
            scenes[i].run();
            return 0;
        }
    }
    fprintf(stderr, "no scene %s\n", arguments[1]);
    return 2;
}
