/* A make-believe libcuda.so.1, whose device is one number and one open file.

In a program: make_believe_open, make_believe_add. In whoever asks for checkpoints: the driver's calls, which tell the
program by two signals, and note themselves in $MAKE_BELIEVE/calls. As with the true driver, calls of the program wait
while its device is away. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RUNNING, LOCKED, CHECKPOINTED };
enum { INVALID_VALUE = 1, ILLEGAL_STATE = 401, NOT_SUPPORTED = 801, TIMED_OUT = 909 };

/* --- in the program --- */

static const char *node;
static int device = -1;
static volatile long on_device, on_host;
static volatile sig_atomic_t is_away;

static void leave_device(int number)
{
    (void)number;
    is_away = 1;
    on_host = on_device;
    on_device = 0;
    close(device);
}

static void come_back(int number)
{
    (void)number;
    device = open(node, O_RDWR);
    on_device = on_host;
    on_host = 0;
    is_away = 0;
}

int make_believe_open(const char *path)
{
    node = strdup(path);
    device = open(node, O_RDWR);
    signal(SIGUSR1, leave_device);
    signal(SIGUSR2, come_back);
    return device < 0;
}

long make_believe_add(long value)
{
    while (is_away)
        usleep(1000);
    return on_device += value;
}

/* --- the driver --- */

static FILE *in_room(const char *name, const char *mode)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("MAKE_BELIEVE"), name);
    return fopen(path, mode);
}

static void note(const char *format, ...)
{
    va_list words;
    FILE *calls = in_room("calls", "a");
    va_start(words, format);
    vfprintf(calls, format, words);
    va_end(words);
    fclose(calls);
}

static const char *lock_of(int pid)
{
    static char name[64];
    snprintf(name, sizeof name, "locked-%d", pid);
    return name;
}

static int has(const char *name)
{
    FILE *file = in_room(name, "r");
    if (file)
        fclose(file);
    return file != NULL;
}

static int holds_device(int pid)
{
    char path[4096], link[4096];
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *folder = opendir(path);
    int found = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        snprintf(path, sizeof path, "/proc/%d/fd/%s", pid, entry->d_name);
        ssize_t length = readlink(path, link, sizeof link - 1);
        if (length > 0 && (link[length] = 0, strncmp(link, "/dev/nvidia", 11) == 0))
            found = 1;
    }
    if (folder)
        closedir(folder);
    return found;
}

static int maps_us(int pid)
{
    char path[64], line[4096];
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "r");
    int found = 0;
    while (maps && fgets(line, sizeof line, maps))
        found |= strstr(line, "libcuda.so.1") != NULL;
    if (maps)
        fclose(maps);
    return found;
}

static int tell(int pid, int number, int is_there)
{
    kill(pid, number);
    for (int looks = 0; looks < 30000; looks++, usleep(1000))
        if (holds_device(pid) == is_there)
            return 0;
    return TIMED_OUT;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }

int cuGetErrorString(int code, const char **text)
{
    *text = code == NOT_SUPPORTED ? "operation not supported" : "another error";
    return 0;
}

int cuDeviceGetCount(int *count) { return *count = 1, 0; }

int cuDeviceGet(int *found, int number) { return *found = number, 0; }

int cuDeviceGetUuid(unsigned char *uuid, int number)
{
    return memset(uuid, number + atoi(getenv("MAKE_BELIEVE_UUID")), 16), 0;
}

int cuCheckpointProcessGetState(int pid, int *state)
{
    if (!maps_us(pid))
        return INVALID_VALUE;
    *state = !holds_device(pid) ? CHECKPOINTED : has(lock_of(pid)) ? LOCKED : RUNNING;
    return 0;
}

int cuCheckpointProcessLock(int pid, const unsigned *arguments)
{
    note("lock %u\n", arguments[0]);
    fclose(in_room(lock_of(pid), "w"));
    return 0;
}

int cuCheckpointProcessCheckpoint(int pid, const void *arguments)
{
    if (arguments || !has(lock_of(pid)))
        return ILLEGAL_STATE;
    note("checkpoint\n");
    return has("refuses") ? NOT_SUPPORTED : tell(pid, SIGUSR1, 0);
}

struct restore_arguments {
    unsigned char (*pairs)[2][16];
    unsigned num_pairs;
    char reserved[52 - sizeof(void *)];
    unsigned long reserved1;
};

int cuCheckpointProcessRestore(int pid, const struct restore_arguments *arguments)
{
    if (holds_device(pid))
        return ILLEGAL_STATE;
    note("restore");
    for (unsigned each = 0; arguments && each < arguments->num_pairs; each++)
        note(" %d to %d", arguments->pairs[each][0][15], arguments->pairs[each][1][0]);
    note("\n");
    fclose(in_room(lock_of(pid), "w"));
    return tell(pid, SIGUSR2, 1);
}

int cuCheckpointProcessUnlock(int pid, const void *arguments)
{
    char path[4096];
    if (arguments || !has(lock_of(pid)))
        return ILLEGAL_STATE;
    note("unlock\n");
    snprintf(path, sizeof path, "%s/%s", getenv("MAKE_BELIEVE"), lock_of(pid));
    return unlink(path);
}
