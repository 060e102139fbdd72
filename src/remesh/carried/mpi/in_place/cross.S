/* Ways between the halves that C cannot say: into a program that has just been mapped, and back from it. */
    .text

/* void enter_program(Context *save, void *stack, void *entry): go on at `entry`, as the kernel does at execve. It returns
 * when somebody calls go_on(save). fs stays as it is; the C library there sets its own.
 */
    .globl enter_program
    .hidden enter_program
    .type enter_program, @function
enter_program:
    mov %rbx, 0(%rdi)
    mov %rbp, 8(%rdi)
    mov %r12, 16(%rdi)
    mov %r13, 24(%rdi)
    mov %r14, 32(%rdi)
    mov %r15, 40(%rdi)
    mov %rsp, 48(%rdi)
    rdfsbase %rax
    mov %rax, 56(%rdi)
    mov %rsi, %rsp
    mov %rdx, %rax
    xor %ebp, %ebp
    xor %edx, %edx
    jmp *%rax
    .size enter_program, .-enter_program

/* void go_on(Context *there) */
    .globl go_on
    .hidden go_on
    .type go_on, @function
go_on:
    mov 56(%rdi), %rax
    wrfsbase %rax
    mov 0(%rdi), %rbx
    mov 8(%rdi), %rbp
    mov 16(%rdi), %r12
    mov 24(%rdi), %r13
    mov 32(%rdi), %r14
    mov 40(%rdi), %r15
    mov 48(%rdi), %rsp
    ret
    .size go_on, .-go_on

    .section .note.GNU-stack,"",@progbits
