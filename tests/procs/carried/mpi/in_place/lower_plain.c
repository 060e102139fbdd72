/* A lower half without MPI, that gets everything from the kernel which a library may get. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lower_half.h"
#include "plain.h"

static _Thread_local int calls_of_thread;
static char *kept[64];

static int count(void) { return ++calls_of_thread; }

static int fail(void) {
    errno = 0;
    close(-1);
    return errno;
}

/* Memory in all ways, of which nothing is given back. */
static int take_memory(void) {
    for (int i = 0; i < 64; i++) {
        size_t bytes = (size_t)1 << (i % 24);
        kept[i] = realloc(kept[i], bytes);
        if (!kept[i]) return 1;
        memset(kept[i], i, bytes);
    }
    char *grown = realloc(malloc(1 << 20), 64 << 20);
    grown[(64 << 20) - 1] = 1;
    char *moved = mremap(mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 8192, 1 << 22, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) return 2;
    moved[(1 << 22) - 1] = 1;
    long raw = syscall(SYS_mmap, NULL, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int segment = shmget(IPC_PRIVATE, 12345, IPC_CREAT | 0600);
    if (raw < 0 || segment < 0 || shmat(segment, NULL, 0) == (void *)-1) return 3;
    FILE *file = fopen("/proc/self/status", "r");
    return file && mmap(NULL, 100, PROT_READ, MAP_PRIVATE, open("/etc/passwd", O_RDONLY), 0) != MAP_FAILED ? 0 : 4;
}

static int take_descriptors(void) {
    int pair[2], two[2], others[2], given = eventfd(0, 0), got = -1;
    sigset_t none;
    sigemptyset(&none);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || pipe(two) || pipe2(others, O_CLOEXEC)) return 1;
    char room[CMSG_SPACE(sizeof given)], byte = 1;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *control = CMSG_FIRSTHDR(&message);
    *control = (struct cmsghdr){CMSG_LEN(sizeof given), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(control), &given, sizeof given);
    if (sendmsg(pair[0], &message, 0) != 1 || recvmsg(pair[1], &message, 0) != 1) return 2;
    memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof got);
    int made[] = {got, socket(AF_INET, SOCK_STREAM, 0), epoll_create1(0), dup(got), fcntl(got, F_DUPFD, 50), memfd_create("x", 0),
                  open("/", O_DIRECTORY), (int)syscall(SYS_eventfd2, 0, 0), signalfd(-1, &none, 0), dup2(got, 77)};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i] < 0) return 10 + (int)i;
    /* These do not stay the lower half's: the program gets the numbers. */
    close(made[1]);
    syscall(SYS_close, made[2]);
    return 0;
}

static void *stay(void *nothing) {
    for (;;) pause();
    return nothing;
}
static void *go(void *value) { return value; }
static void *spin(void *nothing) {
    for (;;) getppid();
    return nothing;
}

static int take_threads(void) {
    pthread_t thread;
    void *value;
    for (int i = 0; i < 100; i++)
        if (pthread_create(&thread, NULL, go, kept) || pthread_join(thread, &value) || value != kept) return 1;
    return pthread_create(&thread, NULL, stay, NULL) || pthread_create(&thread, NULL, spin, NULL);
}

static int set_handler(void) {
    struct sigaction old;
    signal(SIGUSR1, SIG_IGN);
    sigaction(SIGUSR1, NULL, &old);
    return old.sa_handler == SIG_IGN ? 0 : 1;
}

static int run_command(void) { return system("exit 7") >> 8; }
static int *volatile nowhere = (int *)8;
static int *told_of_end;
static void at_end(void) { ++*told_of_end; }
static int tell_of_end(int *word) {
    told_of_end = word;
    return atexit(at_end);
}

static int crash(void) { return *nowhere; }
static int wait_ms(int ms) { return usleep((unsigned)ms * 1000); }

const void *lower_functions(void) {
    static const Plain plain = {count, fail, take_memory, take_descriptors, take_threads, set_handler, run_command, crash, wait_ms, tell_of_end};
    return &plain;
}
