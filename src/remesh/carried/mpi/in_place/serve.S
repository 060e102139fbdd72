/* From the place where a system call stood to the function that serves it, and back from a handler of signals. */
    .text

/* A stub of sites.c comes here in the place of an instruction `syscall`, with the stack below the red zone. All registers
 * but rax, rcx and r11 are as they were when it returns; the functions use no others (general-regs-only), and no stack
 * that is aligned by the C library's rules is there before this.
 */
    .macro SERVE name, function
    .globl \name
    .hidden \name
    .type \name, @function
\name:
    push %rbp
    mov %rsp, %rbp
    push %r9
    push %r8
    push %r10
    push %rdx
    push %rsi
    push %rdi
    push %rax
    mov %rsp, %rdi                  /* long call[7]: the number and six arguments */
    and $-16, %rsp
    call \function
    lea -48(%rbp), %rsp
    pop %rdi
    pop %rsi
    pop %rdx
    pop %r10
    pop %r8
    pop %r9
    pop %rbp
    ret
    .size \name, .-\name
    .endm

    SERVE enter_serve_lower, serve_lower
    SERVE enter_serve_upper, serve_upper
    SERVE enter_before_clone, before_clone
    SERVE enter_after_clone, after_clone

/* Where the kernel goes on behind a handler of ours. */
    .globl return_from_signal
    .hidden return_from_signal
    .type return_from_signal, @function
return_from_signal:
    mov $15, %eax
    syscall
    .size return_from_signal, .-return_from_signal

    .section .note.GNU-stack,"",@progbits
