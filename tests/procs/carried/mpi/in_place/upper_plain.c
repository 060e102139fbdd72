/* A program that loads a lower half, uses it in one of these ways, and drops it: upper_plain LOWER WAY. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "in_place.h"
#include "audit.h"
#include "plain.h"

extern char **environ;
static const Plain *lower;
static const char *program;

static _Noreturn void fail(int line, const char *condition) {
    fprintf(stderr, "line %d: %s\n", line, condition);
    _exit(1);
}
#define MUST(condition) ((condition) ? (void)0 : fail(__LINE__, #condition))

static void load(void) {
    const void *functions;
    const char *error = load_lower(program, "/none", environ, &functions);
    if (error) fprintf(stderr, "%s\n", error), exit(2);
    lower = functions;
}
static void drop(void) {
    const char *error = drop_lower();
    if (error) fprintf(stderr, "%s\n", error), exit(3);
}

/* What there is of this process, in words: all but what the C library takes for itself with time, and reading it takes. */
static void look(char *text, size_t room) {
    size_t length = 0;
    DIR *folder = opendir("/proc/self/fd");
    for (struct dirent *entry; (entry = readdir(folder));) {
        char target[256];
        ssize_t count = readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1);
        if (count > 0 && !strstr((target[count] = 0, target), "/fd")) length += (size_t)snprintf(text + length, room - length, "%s %s\n", entry->d_name, target);
    }
    closedir(folder);
    folder = opendir("/proc/self/task");
    int num_threads = 0;
    while (readdir(folder)) num_threads++;
    closedir(folder);
    length += (size_t)snprintf(text + length, room - length, "%d threads\n", num_threads - 2);
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        sscanf(line, "%lx-%lx", &from, &to);
        if (!strstr(line, "[heap]")) length += (size_t)snprintf(text + length, room - length, "%s", line);
    }
    fclose(maps);
    MUST(length < room);
}

static void nothing_is_left(void) {
    static char before[1 << 18], after[1 << 18];
    load(), drop(); /* what is once only: the rewritten place of the C library */
    look(before, sizeof before);
    for (int round = 0; round < 3; round++) {
        load();
        MUST(CROSS("", lower->take_memory()) == 0);
        int made = CROSS("", lower->take_descriptors());
        MUST(made == 0);
        MUST(CROSS("", lower->take_threads()) == 0);
        MUST(CROSS("", lower->set_handler()) == 0);
        MUST(CROSS("", lower->run_command()) == 7);
        int own = open("/", O_RDONLY), other = open("/", O_RDONLY);
        Belongings found = count_belongings();
        MUST(found.num_threads == 3 && found.num_segments == 1 && found.num_descriptors > 10);
        drop();
        MUST(close(own) == 0 && close(other) == 0);
        look(after, sizeof after);
        if (strcmp(before, after)) fprintf(stderr, "before:\n%s\nafter:\n%s\n", before, after), exit(1);
    }
    printf("nothing\n");
}

static void nothing_gets_by(void) {
    begin_audit();
    nothing_is_left();
}

static void two_libraries(void) {
    load();
    errno = 12;
    MUST(CROSS("", lower->fail()) == EBADF && errno == 12);
    for (int i = 1; i < 1000; i++) MUST(CROSS("", lower->count()) == i);
    drop();
    load();
    MUST(CROSS("", lower->count()) == 1);
    int num_ends = 0, *word = &num_ends;
    MUST(CROSS("", lower->tell_of_end(word)) == 0 && num_ends == 0);
    MUST(end_lower() == NULL && num_ends == 1);
    printf("two\n");
}

static _Thread_local long handled;
static long all_handled;
static _Atomic int is_over;
static void on_timer(int number) {
    int was = errno;
    char text[64];
    snprintf(text, sizeof text, "%d %ld", number, handled++);
    errno = was;
}
static void *call_often(void *value) {
    long calls = (long)value;
    for (long i = 0; i < calls; i++) {
        int sum = CROSS("", lower->count());
        if (sum < 1) return "no count";
        if (i % 16 == 0 && CROSS("", lower->fail()) != EBADF) return "errno";
    }
    __atomic_fetch_add(&all_handled, handled, __ATOMIC_SEQ_CST);
    return NULL;
}
static void many_threads(void) {
    signal(SIGALRM, on_timer);
    load();
    struct itimerval often = {{0, 300}, {0, 300}};
    setitimer(ITIMER_REAL, &often, NULL);
    for (int round = 0; round < 400; round++) {
        pthread_t threads[8];
        void *error;
        for (int i = 0; i < 8; i++) MUST(pthread_create(&threads[i], NULL, call_often, (void *)(long)(round % 8 == 0 ? 4000 : 50)) == 0);
        for (int i = 0; i < 8; i++) MUST(pthread_join(threads[i], &error) == 0 && !error);
    }
    call_often((void *)4000);
    MUST(CROSS("", lower->wait_ms(50)) == 0 || 1);
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL);
    Belongings found = count_belongings();
    MUST(found.num_threads <= 1 + 9);
    MUST(all_handled > 0);
    drop();
    printf("%d threads of ours\n", found.num_threads);
}

static void *load_beside(void *nothing) {
    while (!is_over) free(malloc(100)), getppid();
    return nothing;
}
static void under_load(void) {
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, load_beside, NULL);
    for (int round = 0; round < 10; round++) {
        load();
        MUST(CROSS("", lower->take_memory()) == 0 && CROSS("", lower->take_threads()) == 0);
        drop();
    }
    is_over = 1;
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    printf("loaded\n");
}

static void children(void) {
    load();
    MUST(CROSS("", lower->take_memory()) == 0 && CROSS("", lower->take_descriptors()) == 0);
    for (int i = 0; i < 20; i++) {
        fflush(stdout);
        pid_t child = fork();
        int status;
        if (child == 0) signal(SIGINT, SIG_DFL), exit(strlen(strsignal(SIGINT)) > 0 ? 5 : 6);
        MUST(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 5);
        MUST(system("exit 3") >> 8 == 3);
        FILE *said = popen("echo word", "r");
        char text[16];
        MUST(fgets(text, sizeof text, said) && !strcmp(text, "word\n") && pclose(said) == 0);
        MUST(CROSS("", lower->count()) == i + 1);
    }
    drop();
    printf("children\n");
}

static void own_handler(int number) { (void)number; }
static void handlers_are_as_asked(void) {
    struct sigaction asked = {.sa_handler = own_handler, .sa_flags = SA_RESTART}, told;
    signal(SIGUSR1, own_handler);
    load();
    MUST(sigaction(SIGUSR1, NULL, &told) == 0 && told.sa_handler == own_handler && told.sa_flags & SA_RESTART);
    MUST(sigaction(SIGUSR2, &asked, &told) == 0 && told.sa_handler == SIG_DFL);
    MUST(sigaction(SIGUSR2, NULL, &told) == 0 && told.sa_handler == own_handler && !(told.sa_flags & SA_SIGINFO));
    MUST(sigaction(SIGSEGV, NULL, &told) == 0 && told.sa_handler == SIG_DFL);
    MUST(signal(SIGTERM, SIG_IGN) == SIG_DFL && signal(SIGTERM, SIG_DFL) == SIG_IGN);
    MUST(sigaction(SIGKILL, &asked, NULL) == -1 && errno == EINVAL);
    drop();
    MUST(sigaction(SIGUSR1, NULL, &told) == 0 && told.sa_handler == own_handler);
    raise(SIGUSR1), raise(SIGUSR2);
    printf("handlers\n");
}

static void crash_inside(void) {
    load();
    CROSS("MPI_Of_test", lower->crash());
}
static void crash_outside(void) {
    load();
    static int *volatile nowhere = (int *)8;
    *nowhere = 1;
}
static void addresses_taken(void) {
    mmap((void *)(REGION_START + (1ul << 35)), 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    load();
}

int main(int count, char **arguments) {
    static const struct { const char *name; void (*run)(void); } ways[] = {
        {"nothing_is_left", nothing_is_left}, {"nothing_gets_by", nothing_gets_by}, {"two_libraries", two_libraries}, {"many_threads", many_threads},
        {"under_load", under_load}, {"children", children}, {"handlers_are_as_asked", handlers_are_as_asked},
        {"crash_inside", crash_inside}, {"crash_outside", crash_outside}, {"addresses_taken", addresses_taken}, {"load", load}};
    program = arguments[1];
    for (size_t i = 0; count == 3 && i < sizeof ways / sizeof *ways; i++)
        if (!strcmp(ways[i].name, arguments[2])) return ways[i].run(), 0;
    return 9;
}
