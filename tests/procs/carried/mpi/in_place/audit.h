/* Proof that no call of the lower half gets by: from now on the kernel ends the process at one that should be served and
 * is made by code in the region, except by the stubs. It stays so until the process ends.
 */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "region.h"

static void begin_audit(void) {
    static const int served[] = {
        SYS_open, SYS_openat, SYS_openat2, SYS_creat, SYS_socket, SYS_accept, SYS_accept4, SYS_dup, SYS_dup2, SYS_dup3, SYS_eventfd,
        SYS_eventfd2, SYS_epoll_create, SYS_epoll_create1, SYS_memfd_create, SYS_signalfd, SYS_signalfd4, SYS_timerfd_create,
        SYS_inotify_init, SYS_inotify_init1, SYS_pidfd_open, SYS_userfaultfd, SYS_perf_event_open, SYS_io_uring_setup, SYS_mmap,
        SYS_brk, SYS_mremap, SYS_shmat, SYS_shmget, SYS_socketpair, SYS_pipe, SYS_pipe2, SYS_fcntl, SYS_recvmsg, SYS_recvmmsg,
        SYS_close, SYS_close_range, SYS_rt_sigprocmask, SYS_rt_sigaction, SYS_sigaltstack, SYS_set_tid_address,
        SYS_set_robust_list, SYS_rseq, SYS_exit_group, SYS_clone, SYS_clone3, SYS_io_setup};
    enum { COUNT = sizeof served / sizeof *served };
    struct sock_filter lines[COUNT + 16], *to = lines;
    *to++ = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < COUNT; i++) *to++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)served[i], (unsigned char)(COUNT - i), 0);
    *to++ = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    size_t at = offsetof(struct seccomp_data, instruction_pointer);
    unsigned first = (unsigned)(REGION_START >> 32), last = (unsigned)((REGION_START + REGION_BYTES) >> 32);
    *to++ = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)at + 4);
    *to++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, last, 4, 0);
    *to++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, first, 0, 3);
    *to++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, first, 3, 0);
    *to++ = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)at);
    *to++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 1 << 18, 1, 0);
    *to++ = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    *to++ = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog filter = {(unsigned short)(to - lines), lines};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter)) perror("seccomp"), exit(4);
}
