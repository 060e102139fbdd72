/* What is left of the init of an upper half once its program runs? A parent that reaps, in a tenth of a megabyte.

   An init in Python (init.py) makes the namespaces and starts or restores the program, and executes this in its place:
   the process stays the same, with its children, and gives its memory back. reaper.py says the same in Python.

       remesh-init ORDERS NEWS PROGRAM     two descriptors and the process id of the program, as numbers

   ORDERS brings one byte once the program has been found by its id; until then nobody is reaped. When it closes, the
   lower half has ended, and with this process all in its namespace. NEWS is told how the program ended. */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

/* One byte of the lower half's; 0 where it has ended. */
static int hear(int orders)
{
    char byte;
    ssize_t got;
    do
        got = read(orders, &byte, 1);
    while (got < 0 && errno == EINTR);
    return got == 1;
}

/* Reap all that have ended; when the program is among them, tell and end. */
static void reap(int news, pid_t program)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid != program)
            continue;
        int code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
        dprintf(news, "{\"event\": \"ended\", \"status\": %d}\n", code);
        _exit(0);
    }
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    int orders = atoi(arguments[1]), news = atoi(arguments[2]);
    pid_t program = atoi(arguments[3]);
    sigset_t ended;
    sigemptyset(&ended);
    sigaddset(&ended, SIGCHLD);
    sigprocmask(SIG_BLOCK, &ended, NULL);
    int children = signalfd(-1, &ended, SFD_CLOEXEC | SFD_NONBLOCK);
    if (children < 0 || !hear(orders))
        return 1;
    struct pollfd looked_at[] = {{.fd = orders, .events = POLLIN}, {.fd = children, .events = POLLIN}};
    for (;;) {
        reap(news, program);
        poll(looked_at, 2, -1);
        struct signalfd_siginfo told;
        while (read(children, &told, sizeof told) > 0)
            continue;
        if (looked_at[0].revents && !hear(orders))
            return 0;
    }
}
