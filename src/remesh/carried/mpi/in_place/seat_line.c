/* Both ends of the line between a seat and the program that gets its place: see seat.h. */
#define _GNU_SOURCE
#include "seat.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { TIMEOUT_S = 60, POLL_MS = 2, MAX_BYTES = 64 << 20 };

static bool fill_address(const char *path, struct sockaddr_un *address) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (strlen(path) < sizeof address->sun_path) return strcpy(address->sun_path, path), true;
    errno = ENAMETOOLONG;
    return false;
}

static bool write_all(int line, const void *bytes, size_t count) {
    for (const char *at = bytes; count;) {
        ssize_t done = send(line, at, count, MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return false;
        at += done, count -= (size_t)done;
    }
    return true;
}
static bool read_all(int line, void *bytes, size_t count) {
    for (char *at = bytes; count;) {
        ssize_t done = read(line, at, count);
        if (done < 0 && errno == EINTR) continue;
        if (done == 0) errno = ECONNRESET;
        if (done <= 0) return false;
        at += done, count -= (size_t)done;
    }
    return true;
}

int reach_seat_line(const char *path) {
    struct sockaddr_un address;
    if (!fill_address(path, &address)) return -1;
    int line = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* The program may come later than its seat. */
    for (int tries = TIMEOUT_S * 1000 / POLL_MS; line >= 0 && tries > 0; tries--) {
        if (connect(line, (struct sockaddr *)&address, sizeof address) == 0) return line;
        if (errno != ENOENT && errno != ECONNREFUSED && errno != EINTR) break;
        nanosleep(&(struct timespec){0, POLL_MS * 1000000}, NULL);
    }
    int why = errno;
    if (line >= 0) close(line);
    errno = why;
    return -1;
}

/* A head of fixed size carries the descriptor, so that it cannot be torn apart. */
typedef struct {
    uint64_t num_bytes;
    bool has_descriptor;
} Head;
typedef union {
    struct cmsghdr control;
    char room[CMSG_SPACE(sizeof(int))];
} Rights;

bool hand_over_seat(int line, char *const *variables, int descriptor) {
    Head head = {0, descriptor >= 0};
    for (char *const *one = variables; *one; one++) head.num_bytes += strlen(*one) + 1;
    Rights rights;
    memset(&rights, 0, sizeof rights);
    struct iovec part = {&head, sizeof head};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (head.has_descriptor) {
        message.msg_control = &rights, message.msg_controllen = sizeof rights;
        rights.control = (struct cmsghdr){CMSG_LEN(sizeof descriptor), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(&rights.control), &descriptor, sizeof descriptor);
    }
    if (sendmsg(line, &message, MSG_NOSIGNAL) != (ssize_t)sizeof head) return false;
    for (char *const *one = variables; *one; one++)
        if (!write_all(line, *one, strlen(*one) + 1)) return false;
    return true;
}

static int accept_one(const char *path) {
    struct sockaddr_un address;
    if (!fill_address(path, &address)) return -1;
    int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), line = -1;
    if (listening < 0) return -1;
    unlink(path);
    if (bind(listening, (struct sockaddr *)&address, sizeof address) == 0 && listen(listening, 1) == 0)
        do line = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
        while (line < 0 && errno == EINTR);
    int why = errno;
    close(listening);
    unlink(path);
    errno = why;
    return line;
}

static bool receive_head(int line, Head *head, int *descriptor) {
    Rights rights;
    struct iovec part = {head, sizeof *head};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    ssize_t count;
    do count = recvmsg(line, &message, MSG_WAITALL);
    while (count < 0 && errno == EINTR);
    struct cmsghdr *control = count < 0 ? NULL : CMSG_FIRSTHDR(&message);
    *descriptor = -1;
    if (control && control->cmsg_type == SCM_RIGHTS) memcpy(descriptor, CMSG_DATA(control), sizeof *descriptor);
    bool is_whole = count == (ssize_t)sizeof *head && head->num_bytes <= MAX_BYTES &&
                    head->has_descriptor == (*descriptor >= 0);
    if (!is_whole && count >= 0) errno = EPROTO;
    return is_whole;
}

/* The variables, where PMI_FD has the number that the descriptor has here. */
static char **read_variables(int line, size_t num_bytes, int descriptor) {
    static const char name[] = "PMI_FD=";
    enum { NUMBER_BYTES = 32 };
    /* A variable has two bytes at least, so there are no more than that. */
    size_t most = num_bytes / 2 + 2;
    char **variables = malloc(most * sizeof *variables + num_bytes + 1 + NUMBER_BYTES);
    if (!variables) return NULL;
    char *text = (char *)(variables + most), *number = text + num_bytes + 1, **to = variables;
    if (!read_all(line, text, num_bytes)) return free(variables), NULL;
    text[num_bytes] = 0;
    for (char *at = text; at < text + num_bytes && to < variables + most - 1; at += strlen(at) + 1) {
        bool is_number = descriptor >= 0 && strncmp(at, name, sizeof name - 1) == 0;
        if (is_number) snprintf(number, NUMBER_BYTES, "%s%d", name, descriptor);
        *to++ = is_number ? number : at;
    }
    *to = NULL;
    return variables;
}

/* Whoever kills a rank of the job kills its seat; the kernel then does the same to the program that has its place. */
static bool end_with(int line) {
    struct pollfd now = {.fd = line, .events = POLLIN};
    bool is_set = fcntl(line, F_SETSIG, SIGKILL) == 0 && fcntl(line, F_SETOWN, getpid()) == 0 &&
                  fcntl(line, F_SETFL, fcntl(line, F_GETFL) | O_ASYNC) == 0;
    if (!is_set) return false;
    if (poll(&now, 1, 0) == 0) return true;
    errno = ECONNRESET;
    return false;
}

bool take_seat(const char *path, Seat *seat) {
    Head head;
    *seat = (Seat){accept_one(path), -1, NULL};
    if (seat->line >= 0 && receive_head(seat->line, &head, &seat->descriptor))
        seat->variables = read_variables(seat->line, (size_t)head.num_bytes, seat->descriptor);
    if (seat->variables && end_with(seat->line)) return true;
    free(seat->variables);
    int why = errno;
    if (seat->descriptor >= 0) close(seat->descriptor);
    if (seat->line >= 0) close(seat->line);
    errno = why;
    return false;
}

void leave_seat(Seat *seat, int status) {
    unsigned char byte = (unsigned char)status;
    fcntl(seat->line, F_SETFL, fcntl(seat->line, F_GETFL) & ~O_ASYNC);
    write_all(seat->line, &byte, 1);
    close(seat->line);
    free(seat->variables);
    *seat = (Seat){-1, -1, NULL};
}
