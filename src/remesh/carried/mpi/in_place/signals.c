/* Signals of the program, which may come while a thread of it is inside the lower half: its handlers are entered through
 * ours, which puts the program's thread pointer back around them.
 *
 * The program's C library has one place that tells the kernel of a handler. It is rewritten as those of the lower half
 * are, and leads to a table here; so it does not matter by which function a program asks, nor how it was linked. The code
 * stays rewritten after a lower half has gone, and then changes nothing.
 *
 * Where the program has no handler for a fault, ours tells whether it was the real MPI's, where, and in which call.
 */
#define _GNU_SOURCE
#include <asm/unistd.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "in_place.h"
#include "raw.h"
#include "sites.h"

enum { NUM_SIGNALS = 65, STUB_BYTES = 4096, RESTORER = 0x04000000, MASK_BYTES = 8 };

/* As the kernel has it. */
typedef struct {
    uint64_t handler, flags, restorer, mask;
} Action;

static Action actions[NUM_SIGNALS]; /* as the program set them */
static _Atomic int lock;
static int pid;
static int64_t place_offset;
static uint64_t (*ways)[1]; /* a word before the stubs: where they lead */

void enter_serve_upper(void);
void return_from_signal(void);
long serve_upper(const long *call);

/* What is called from the middle of a system call, where the other registers are the caller's. */
#define GENERAL __attribute__((target("general-regs-only")))

GENERAL static bool is_fault(int number) {
    return number == SIGSEGV || number == SIGBUS || number == SIGFPE || number == SIGILL || number == SIGABRT;
}

/* ---- what is told of a crash; without a C library, since the thread may be any ---- */

typedef struct {
    char text[512];
    size_t length;
} Line;
static void add(Line *line, const char *text) {
    while (*text && line->length < sizeof line->text) line->text[line->length++] = *text++;
}
static void add_number(Line *line, uint64_t number, unsigned base) {
    char digits[24], *at = digits + sizeof digits;
    *--at = 0;
    do *--at = "0123456789abcdef"[number % base];
    while (number /= base);
    add(line, base == 16 ? "0x" : "");
    add(line, at);
}

static uint64_t hex(const char **text) {
    uint64_t value = 0;
    for (;; ++*text) {
        char c = **text;
        if (c >= '0' && c <= '9') value = value * 16 + (uint64_t)(c - '0');
        else if (c >= 'a' && c <= 'f') value = value * 16 + (uint64_t)(c - 'a' + 10);
        else return value;
    }
}

/* One line of /proc/self/maps, if the address is in it: the file's name and the place in the file. */
static bool names_place(const char *line, uint64_t address, Line *told) {
    const char *at = line;
    uint64_t from = hex(&at), to = (at++, hex(&at)), offset = (at += 6, hex(&at));
    if (address < from || address >= to) return false;
    const char *name = NULL;
    for (; *at; at++)
        if (*at == '/') name = at + 1;
    add(told, name ? name : "memory");
    add(told, "+");
    add_number(told, address - from + (name ? offset : 0), 16);
    return true;
}

static void add_place(Line *told, uint64_t address) {
    char text[1024];
    size_t length = 0;
    long fd = raw(__NR_open, "/proc/self/maps", O_RDONLY | O_CLOEXEC, 0, 0), count;
    bool is_found = false;
    while (fd >= 0 && !is_found && (count = raw(__NR_read, fd, text + length, sizeof text - 1 - length, 0)) > 0) {
        length += (size_t)count;
        size_t begun = 0;
        for (size_t i = 0; i < length && !is_found; i++) {
            if (text[i] != '\n') continue;
            text[i] = 0;
            is_found = names_place(text + begun, address, told);
            begun = i + 1;
        }
        if (begun == 0) begun = length; /* a line that is too long */
        for (size_t i = begun; i < length; i++) text[i - begun] = text[i];
        length -= begun;
    }
    if (fd >= 0) raw(__NR_close, fd, 0, 0, 0);
    if (!is_found) add_number(told, address, 16);
}

static void tell_crash(int number, const ucontext_t *where, const Place *place) {
    Line line = {.length = 0};
    add(&line, "remesh: signal ");
    add_number(&line, (uint64_t)number, 10);
    add(&line, " inside the MPI library, at ");
    add_place(&line, (uint64_t)where->uc_mcontext.gregs[REG_RIP]);
    add(&line, place && place->doing ? ", in " : ", in a thread of its own");
    if (place && place->doing) add(&line, place->doing);
    add(&line, "\n");
    raw(__NR_write, 2, line.text, line.length, 0);
}

/* ---- every signal of the program ---- */

static void die_of(int number, const siginfo_t *info) {
    Action none = {(uint64_t)SIG_DFL, RESTORER, (uint64_t)return_from_signal, 0};
    raw(__NR_rt_sigaction, number, &none, 0, MASK_BYTES);
    /* What a fault raised comes again as its instruction does; what was sent does not. */
    if (info->si_code <= 0) raw(__NR_tgkill, raw(__NR_getpid, 0, 0, 0, 0), raw(__NR_gettid, 0, 0, 0, 0), number, 0);
}

static void on_signal(int number, siginfo_t *info, void *context) {
    uint64_t fs = thread_pointer();
    bool is_inside = is_in_region(fs);
    const Place *place = is_inside ? *(Place *const *)(fs + (uint64_t)place_offset) : NULL;
    uint64_t owner = place ? atomic_load(&place->owner) : 0;
    Action action = actions[number];
    if (action.handler == (uint64_t)SIG_DFL || (is_inside && !owner)) {
        if (is_inside) tell_crash(number, context, place);
        die_of(number, info);
        return;
    }
    if (action.flags & SA_RESETHAND) actions[number].handler = (uint64_t)SIG_DFL;
    if (is_inside) set_thread_pointer(owner);
    ((void (*)(int, siginfo_t *, void *))action.handler)(number, info, context);
    if (is_inside) set_thread_pointer(fs);
}

/* What the kernel is told where the program asks for this. */
GENERAL static Action ours(int number, Action asked) {
    bool is_none = asked.handler == (uint64_t)SIG_DFL;
    if (asked.handler == (uint64_t)SIG_IGN || (is_none && !is_fault(number))) return asked;
    asked.handler = (uint64_t)on_signal;
    asked.flags |= SA_SIGINFO;
    if (!(asked.flags & RESTORER)) asked.flags |= RESTORER, asked.restorer = (uint64_t)return_from_signal;
    /* A stack of the program that is too short for its fault is not ours to mend: what it asked for stays. */
    return asked;
}

/* Instead of rt_sigaction; it is made in the program's C library, by any thread, a handler or a child after fork. */
GENERAL long serve_upper(const long *call) {
    long number = call[1];
    const Action *asked = (const Action *)call[2];
    Action *told = (Action *)call[3];
    /* A child has no lower half, and one that shares our memory none of our table. */
    if (raw(__NR_getpid, 0, 0, 0, 0) != pid || number < 1 || number >= NUM_SIGNALS || call[0] != __NR_rt_sigaction)
        return raw(call[0], call[1], call[2], call[3], call[4]);
    uint64_t all = ~0ul, mask;
    raw(__NR_rt_sigprocmask, SIG_SETMASK, &all, &mask, MASK_BYTES);
    while (atomic_exchange(&lock, 1)) raw(__NR_sched_yield, 0, 0, 0, 0);
    Action before = actions[number];
    long result = 0;
    if (asked) {
        Action wanted = *asked, set = ours((int)number, wanted);
        actions[number] = wanted;
        result = raw(__NR_rt_sigaction, number, &set, 0, call[4]);
        if (result < 0) actions[number] = before;
    }
    if (told && result == 0) *told = before;
    atomic_store(&lock, 0);
    raw(__NR_rt_sigprocmask, SIG_SETMASK, &mask, 0, MASK_BYTES);
    return result;
}

/* ---- the program's C library ---- */

static bool is_alone(void) {
    DIR *folder = opendir("/proc/self/task");
    int count = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder));) count += entry->d_name[0] != '.';
    if (folder) closedir(folder);
    return count == 1;
}

/* Memory for stubs in reach of code. */
static unsigned char *map_near(uint64_t code) {
    for (uint64_t away = 1 << 20; away < 1ul << 30; away += 1 << 20) {
        void *at = mmap((void *)((code & ~(PAGE - 1)) - away), STUB_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (at != MAP_FAILED) return at;
    }
    return NULL;
}

static const char *rewrite_library(unsigned char *code, size_t num_bytes, bool alone, int *num_sites) {
    static const uint64_t served[MAX_CALLS / 64] = {1ul << __NR_rt_sigaction};
    unsigned char *memory = map_near((uint64_t)code);
    if (!memory) return "no memory beside the program's C library";
    ways = (uint64_t(*)[1])(void *)memory;
    (*ways)[0] = (uint64_t)enter_serve_upper;
    Stubs stubs = {memory + 16, memory + STUB_BYTES, (void (*const *)(void))(void *)memory, NULL, NULL, served};
    if (mprotect(code, num_bytes, PROT_READ | PROT_WRITE | PROT_EXEC)) return "the program's C library cannot be written to";
    bool is_done = rewrite_sites_alive(&stubs, code, num_bytes, alone, num_sites);
    mprotect(code, num_bytes, PROT_READ | PROT_EXEC);
    mprotect(memory, STUB_BYTES, PROT_READ | PROT_EXEC);
    if (!is_done)
        return "the program has threads already, and its C library's call for handlers cannot be changed in one step; "
               "start MPI first";
    return NULL;
}

static bool is_c_library(const char *path) {
    const char *name = strrchr(path, '/');
    static const char *const names[] = {"/libc.so", "/libc-2.", "/libpthread", "/ld-musl", "/libc.musl"};
    for (size_t i = 0; name && i < sizeof names / sizeof *names; i++)
        if (strncmp(name, names[i], strlen(names[i])) == 0) return true;
    return false;
}

/* Rewrites what lies outside of the region, and takes over what is set. */
static const char *find_library(void) {
    char line[PATH_MAX + 128], path[PATH_MAX];
    FILE *maps = fopen("/proc/self/maps", "re");
    bool alone = is_alone();
    const char *error = NULL;
    int num_sites = 0, in_all = 0;
    while (maps && !error && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char protection[5];
        if (sscanf(line, "%lx-%lx %4s %*s %*s %*s %4095s", &from, &to, protection, path) != 4) continue;
        if (protection[2] != 'x' || is_in_region(from) || !is_c_library(path)) continue;
        error = rewrite_library((unsigned char *)from, to - from, alone, &num_sites);
        in_all += num_sites;
    }
    if (maps) fclose(maps);
    if (!error && in_all == 0) error = "the program's C library sets handlers of signals in a way that is not known";
    return error;
}

const char *enter_signals_through_us(const Handover *handover) {
    place_offset = handover->place_offset;
    pid = (int)raw(__NR_getpid, 0, 0, 0, 0);
    if (ways) return NULL;
    for (int number = 1; number < NUM_SIGNALS; number++) raw(__NR_rt_sigaction, number, 0, &actions[number], MASK_BYTES);
    const char *error = find_library();
    for (int number = 1; number < NUM_SIGNALS && !error; number++) {
        Action set = ours(number, actions[number]);
        if (set.handler != actions[number].handler) raw(__NR_rt_sigaction, number, &set, 0, MASK_BYTES);
    }
    return error;
}
