// A program that loads plugins, each with a CUDA runtime in a scope of its own. Its arguments are pairs of a plugin and
// the library that counts the plugin's allocations.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

// The loader binds calls in the global scope first: with a runtime there, it has the plugins' memory, too.
#ifdef WITH_RUNTIME
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int test_live(void);
enum { OWN = 0 };
#else
enum { OWN = 1 };
#endif

#define CHECK(what)                                                                                                  \
    do {                                                                                                             \
        if (!(what)) {                                                                                               \
            const char *(*error)(void) = NULL;                                                                       \
            *(void **)&error = dlsym(RTLD_DEFAULT, "poorwill_tms_last_error");                                       \
            fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #what, error());             \
            _exit(1);                                                                                                \
        }                                                                                                            \
    } while (0)

enum { PLUGINS_MAX = 4 };

struct plugin {
    void *library;
    int (*malloc)(void **, size_t), (*free)(void *), (*calls)(void), (*live)(void);
};

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

static struct plugin opened(const char *path, const char *runtime) {
    struct plugin plugin = {.library = dlopen(path, RTLD_NOW | RTLD_LOCAL)};
    CHECK(plugin.library != NULL);
    *(void **)&plugin.malloc = symbol(plugin.library, "plugin_malloc");
    *(void **)&plugin.free = symbol(plugin.library, "plugin_free");
    *(void **)&plugin.calls = symbol(plugin.library, "plugin_calls");
    void *counts = dlopen(runtime, RTLD_NOW | RTLD_NOLOAD);
    CHECK(counts != NULL);
    *(void **)&plugin.live = symbol(counts, "test_live");
    CHECK(dlclose(counts) == 0);
    return plugin;
}

int main(int count, char **arguments) {
    struct plugin plugins[PLUGINS_MAX];
    int loaded = (count - 1) / 2;
    CHECK(loaded > 0 && loaded <= PLUGINS_MAX);
    for (int i = 0; i < loaded; i++) plugins[i] = opened(arguments[2 * i + 1], arguments[2 * i + 2]);
    void *blocks[PLUGINS_MAX];
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < loaded; i++) {
            CHECK(plugins[i].live() == 0);
            CHECK(plugins[i].malloc(&blocks[i], 100) == 0);
            CHECK(plugins[i].live() == OWN);
        }
#ifdef WITH_RUNTIME
        void *block = NULL;
        CHECK(cudaMalloc(&block, 100) == 0);
        CHECK(test_live() == loaded + 1);
        CHECK(cudaFree(block) == 0);
#endif
        for (int i = 0; i < loaded; i++) CHECK(plugins[i].free(blocks[i]) == 0 && plugins[i].live() == 0);
    }
    for (int i = 0; i < loaded; i++) CHECK(plugins[i].calls() == 0 && plugins[i].live() == 0);
    // In a region they are no runtime's.
    void (*region)(unsigned char) = NULL;
    *(void **)&region = symbol(RTLD_DEFAULT, "tms_set_interesting_region");
    region(true);
    for (int i = 0; i < loaded; i++) CHECK(plugins[i].malloc(&blocks[i], 100) == 0 && plugins[i].live() == 0);
    for (int i = 0; i < loaded; i++) CHECK(plugins[i].free(blocks[i]) == 0 && plugins[i].live() == 0);
    for (int i = 0; i < loaded; i++) {
        const char *path = arguments[2 * i + 1], *runtime = arguments[2 * i + 2];
        CHECK(dlclose(plugins[i].library) == 0);
        // Runtimes that were called stay, and plugins go.
        bool stays = dlopen(path, RTLD_NOW | RTLD_NOLOAD) != NULL;
        CHECK(stays == (OWN == 1 && strcmp(path, runtime) == 0));
    }
    int *hooked = dlsym(RTLD_DEFAULT, "hook_calls");
    CHECK(hooked == NULL || *hooked > 0);
    return 0;
}
