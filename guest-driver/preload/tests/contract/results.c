// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A client that prints what its calls return, and a server that echoes. `results MODE PORT`.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(is) do { if (!(is)) { printf("line %d: %s, errno %d\n", __LINE__, #is, errno); \
    fflush(stdout); abort(); } } while (0)
// Prints the result of a call.
#define RESULT(call) do { errno = 0; long r_ = (long)(call); \
    printf("%s = %ld %s\n", #call, r_, r_ < 0 ? strerrorname_np(errno) : ""); } while (0)

static int port;
static int fd;

static int connected(void) {
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(s >= 0 && connect(s, (void *)&a, sizeof a) == 0);
    return s;
}

static void exchange(void) {
    char in[5];
    CHECK(send(fd, "hello", 5, 0) == 5 && recv(fd, in, 5, MSG_WAITALL) == 5);
    CHECK(!memcmp(in, "hello", 5));
}

// Reads nothing after a message that ends with an exclamation mark, until another client comes.
static void server(void) {
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    CHECK(bind(l, (void *)&a, sizeof a) == 0 && listen(l, 64) == 0);
    int s = accept(l, NULL, NULL);
    static char buf[65536];
    for (ssize_t n; (n = recv(s, buf, sizeof buf, 0)) > 0;) {
        if (buf[n - 1] == '!') close(accept(l, NULL, NULL));
        else if (send(s, buf, n, MSG_NOSIGNAL) < 0) break;
    }
    close(s);
}

// Listens without SO_REUSEADDR, and again when its client has closed the connection first.
static void listens_again(void) {
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < 2; i++) {
        char in[5];
        int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        RESULT(bind(l, (void *)&a, sizeof a));
        RESULT(listen(l, 5));
        if (i > 0) break;
        int s = accept(l, NULL, NULL);
        CHECK(recv(s, in, 5, MSG_WAITALL) == 5 && send(s, in, 5, 0) == 5);
        RESULT(recv(s, in, 5, 0));
        close(s);
        close(l);
        usleep(200000);
    }
}

static void later(long millis) {
    struct timespec t = { millis / 1000, millis % 1000 * 1000000 };
    while (nanosleep(&t, &t) < 0) {}
}

// Each arrival is an edge of a set that is in another one, whether or not the last bytes were read.
static void edges(void) {
    int inner = epoll_create1(0), outer = epoll_create1(0);
    struct epoll_event e = { .events = EPOLLIN | EPOLLET }, list[4];
    CHECK(epoll_ctl(inner, EPOLL_CTL_ADD, fd, &e) == 0);
    e.events = EPOLLIN;
    CHECK(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &e) == 0);
    for (int i = 0; i < 5; i++) {
        char byte;
        CHECK(send(fd, "abc", 3, 0) == 3);
        later(50);
        RESULT(epoll_wait(outer, list, 4, 60000));
        RESULT(epoll_wait(inner, list, 4, 60000));
        CHECK(recv(fd, &byte, 1, 0) == 1);
        RESULT(epoll_wait(inner, list, 4, 20));
    }
}

static volatile int told;

static void on_input(int signal, siginfo_t *info, void *context) {
    (void)context;
    if (signal == SIGRTMIN + 3 && info->si_fd == fd && info->si_code == POLL_IN) told = 1;
}

// The program chooses the signal of asynchronous I/O.
static void setsig(void) {
    struct sigaction action = { .sa_sigaction = on_input, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGRTMIN + 3, &action, NULL) == 0);
    RESULT(fcntl(fd, F_SETSIG, SIGRTMIN + 3));
    RESULT(fcntl(fd, F_SETOWN, getpid()));
    RESULT(fcntl(fd, F_SETFL, O_RDWR | O_ASYNC));
    CHECK(send(fd, "a", 1, 0) == 1);
    for (int i = 0; i < 3000 && !told; i++) later(20);
    printf("told: %d\n", told);
    RESULT(fcntl(fd, F_GETSIG) - SIGRTMIN);
}

// Addresses that lead nowhere.
static void addresses(void) {
    void *bad = (void *)8;
    int options[][2] = { { SOL_SOCKET, SO_ERROR }, { SOL_SOCKET, SO_SNDBUF }, { IPPROTO_TCP, 1 },
        { IPPROTO_TCP, 11 }, { IPPROTO_TCP, 12 }, { SOL_SOCKET, SO_RCVTIMEO } };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        int level = options[i][0], name = options[i][1], value;
        socklen_t four = 4, negative = -1, none = 0;
        RESULT(getsockopt(fd, level, name, bad, &four));
        RESULT(getsockopt(fd, level, name, &value, bad));
        RESULT(getsockopt(fd, level, name, &value, &negative));
        RESULT(getsockopt(fd, level, name, &value, &none));
        RESULT(setsockopt(fd, level, name, bad, 4));
    }
    unsigned long requests[] = { FIONREAD, TIOCOUTQ, 0x8905, FIONBIO, 0x8901, 0x8903 };
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
        RESULT(ioctl(fd, requests[i], bad));
    }
    int file = memfd_create("file", 0);
    CHECK(write(file, "file", 4) == 4);
    RESULT(sendfile(fd, file, bad, 4));
    RESULT(sendfile(fd, open("/dev/null", O_WRONLY), NULL, 4));
    RESULT(splice(file, &(loff_t){ 0 }, fd, NULL, 4, 0));
    RESULT(getpeername(fd, bad, &(socklen_t){ 16 }));
    RESULT(getsockname(fd, (void *)&(struct sockaddr_in){ 0 }, bad));
}

// Messages and times that the kernel refuses.
static void messages(void) {
    char byte = 'x', control[64] = { 0 };
    struct iovec one = { &byte, 1 };
    struct msghdr m = { .msg_iov = &one, .msg_iovlen = 1, .msg_control = control };
    m.msg_controllen = CMSG_SPACE(4);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    int kinds[][3] = { { SOL_SOCKET, 1, 4 }, { SOL_SOCKET, SO_MARK, 3 }, { SOL_SOCKET, 61, 4 },
        { SOL_SOCKET, 77, 4 }, { IPPROTO_IP, 2, 4 }, { IPPROTO_TCP, 1, 4 }, { SOL_SOCKET, 37, 4 },
        { SOL_SOCKET, 1, -13 }, { SOL_SOCKET, 1, 1000 } };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        c->cmsg_level = kinds[i][0];
        c->cmsg_type = kinds[i][1];
        c->cmsg_len = CMSG_LEN(kinds[i][2]);
        RESULT(sendmsg(fd, &m, 0));
    }
    struct sockaddr_in address = { .sin_family = AF_INET };
    RESULT(send(fd, "m", 1, MSG_FASTOPEN));
    RESULT(sendto(fd, "m", 1, 0, (void *)&address, sizeof address));
    RESULT(sendto(fd, "m", 1, 0, (void *)&address, 300));
    RESULT(sendto(fd, "m", 1, 0, (void *)8, sizeof address));
    m.msg_controllen = 0;
    m.msg_iovlen = 1025;
    RESULT(sendmsg(fd, &m, 0));
    RESULT(recvmsg(fd, &m, MSG_DONTWAIT));
    struct timespec no_time = { 0, 2000000000 }, negative = { -1, 0 };
    m.msg_iovlen = 1;
    struct mmsghdr many = { .msg_hdr = m };
    later(50);
    RESULT(recvmmsg(fd, &many, 1, 0, &no_time));
    RESULT(recvmmsg(fd, &many, 1, 0, &negative));
    struct pollfd p = { .fd = fd, .events = POLLIN };
    RESULT(ppoll(&p, 1, &no_time, NULL));
    int set = epoll_create1(0);
    struct epoll_event e = { .events = EPOLLIN };
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, fd, &e) == 0);
    RESULT(epoll_pwait2(set, &e, 1, &no_time, NULL));
    RESULT(epoll_pwait2(set, &e, 1, &negative, NULL));
    fd_set read;
    FD_ZERO(&read);
    FD_SET(fd, &read);
    RESULT(pselect(fd + 1, &read, NULL, NULL, &no_time, NULL));
}

static pthread_t self;

static void nothing(int signal) {
    (void)signal;
}

static volatile int over;

static void *interrupts(void *argument) {
    while (!over) {
        later(50);
        CHECK(pthread_kill(self, SIGUSR1) == 0);
    }
    return argument;
}

// A splice that waits for room takes nothing out of its pipe when a signal ends it.
static void splices(void) {
    static char full[65536];
    int buffer = 20000, ends[2], flags = fcntl(fd, F_GETFL);
    CHECK(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer) == 0);
    CHECK(send(fd, "!", 1, 0) == 1 && pipe(ends) == 0 && write(ends[1], full, 1000) == 1000);
    struct sigaction action = { .sa_handler = nothing };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    self = pthread_self();
    pthread_t other;
    CHECK(pthread_create(&other, NULL, interrupts, NULL) == 0);
    // TCP finds room once more, and takes bytes. They are put back, and it is filled again.
    long taken;
    do {
        CHECK(fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0);
        while (send(fd, full, sizeof full, 0) > 0) {}
        while (send(fd, full, 1, 0) > 0) {}
        CHECK(errno == EAGAIN && fcntl(fd, F_SETFL, flags) == 0);
        taken = splice(ends[0], NULL, fd, NULL, 1000, 0);
        CHECK(taken < 0 ? errno == EINTR : write(ends[1], full, taken) == taken);
        int left;
        CHECK(ioctl(ends[0], FIONREAD, &left) == 0 && left == 1000);
    } while (taken > 0);
    over = 1;
    pthread_join(other, NULL);
    close(connected());
}

static void *closes(void *argument) {
    later(200);
    CHECK(close(fd) == 0);
    close(connected());
    return argument;
}

// Another thread closes a descriptor of a select, whose connection shows an end later.
static void selects(void) {
    int copy = dup(fd);
    fd_set read;
    FD_ZERO(&read);
    FD_SET(fd, &read);
    pthread_t other;
    CHECK(pthread_create(&other, NULL, closes, NULL) == 0);
    struct timeval t = { 100, 0 };
    CHECK(send(copy, "!", 1, 0) == 1 && shutdown(copy, SHUT_WR) == 0);
    RESULT(select(copy + 1, &read, NULL, NULL, &t));
    printf("%d\n", !!FD_ISSET(fd, &read));
    pthread_join(other, NULL);
}

// The child is the first process of another PID namespace.
static void namespaces(void) {
    RESULT(unshare(CLONE_NEWPID));
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        exchange();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    printf("status %d\n", status);
    exchange();
}

static long results[9];

// Calls of a thread that was cancelled. The last one is a cancellation point.
static void *is_cancelled(void *argument) {
    int on = 1, set = epoll_create1(0), file = memfd_create("file", 0);
    socklen_t len = sizeof on;
    struct sockaddr_in address;
    struct epoll_event event = { .events = EPOLLIN };
    CHECK(write(file, "file", 4) == 4 && lseek(file, 0, SEEK_SET) == 0);
    CHECK(pthread_cancel(pthread_self()) == 0);
    results[0] = sendfile(fd, file, NULL, 4);
    results[1] = dup2(fd, 100);
    results[2] = setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    results[3] = getsockopt(fd, SOL_SOCKET, SO_ERROR, &on, &len);
    results[4] = ioctl(fd, FIONREAD, &on);
    results[5] = fcntl(fd, F_SETFL, fcntl(fd, F_GETFL));
    len = sizeof address;
    results[6] = getpeername(fd, (void *)&address, &len);
    results[7] = epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
    results[8] = shutdown(fd, SHUT_WR);
    char rest[4];
    recv(fd, rest, 4, 0);
    results[8] = 1;
    return argument;
}

static void cancelled(void) {
    pthread_t other;
    void *result;
    CHECK(pthread_create(&other, NULL, is_cancelled, NULL) == 0);
    CHECK(pthread_join(other, &result) == 0);
    for (int i = 0; i < 9; i++) printf("call %d: %ld\n", i, results[i]);
    printf("cancelled: %d\n", result == PTHREAD_CANCELED);
    char rest[4];
    RESULT(recv(fd, rest, 4, MSG_WAITALL));
}

static void *disconnects(void *argument) {
    struct sockaddr none = { .sa_family = AF_UNSPEC };
    later(200);
    CHECK(connect(fd, &none, sizeof none) == 0);
    return argument;
}

// Another thread disconnects the socket while this one reads.
static void disconnected(void) {
    pthread_t other;
    char byte;
    CHECK(pthread_create(&other, NULL, disconnects, NULL) == 0);
    RESULT(recv(fd, &byte, 1, 0));
    pthread_join(other, NULL);
    RESULT(recv(fd, &byte, 1, 0));
}

// The kernel makes no user namespace for a process that has another root.
static void rooted(void) {
    RESULT(chroot("/proc/self/fdinfo"));
    RESULT(chdir("/"));
    // The library has threads, so a call that would succeed for a user is refused (EINVAL).
    if (geteuid() == 0) RESULT(unshare(CLONE_NEWUSER));
    exchange();
}

// The kernel refuses all calls but those that the program makes.
static void filtered(void) {
    static const int allowed[] = { SYS_read, SYS_write, SYS_sendto, SYS_recvfrom, SYS_close,
        SYS_exit, SYS_exit_group, SYS_rt_sigreturn, SYS_rt_sigprocmask, SYS_futex, SYS_brk, SYS_mmap,
        SYS_munmap, SYS_shutdown, SYS_clock_gettime, SYS_clock_nanosleep, SYS_newfstatat };
    size_t n = sizeof allowed / sizeof *allowed;
    struct sock_filter filter[64] = { BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0) };
    for (size_t i = 0; i < n; i++) {
        unsigned char to_the_end = n - i;
        filter[i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i],
            to_the_end, 0);
    }
    filter[n + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    filter[n + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = { n + 3, filter };
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    for (int i = 0; i < 100; i++) exchange();
    later(100);
    exchange();
    RESULT(shutdown(fd, SHUT_WR));
    char byte;
    RESULT(recv(fd, &byte, 1, 0));
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    const char *mode = argv[1];
    port = atoi(argv[2]);
    if (!strcmp(mode, "server")) {
        server();
        return 0;
    }
    if (!strcmp(mode, "listens-again")) {
        listens_again();
        return 0;
    }
    if (!strcmp(mode, "no-files")) {
        struct rlimit none = { 0, 0 };
        CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0);
    }
    if (!strcmp(mode, "no-memory")) {
        struct rlimit none = { 1, 1 };
        CHECK(setrlimit(RLIMIT_DATA, &none) == 0);
        for (size_t size = 1 << 20; size > 8; size /= 2) while (malloc(size)) {}
    }
    fd = connected();
    exchange();
    if (!strcmp(mode, "edges")) edges();
    else if (!strcmp(mode, "setsig")) setsig();
    else if (!strcmp(mode, "addresses")) addresses();
    else if (!strcmp(mode, "messages")) messages();
    else if (!strcmp(mode, "splices")) splices();
    else if (!strcmp(mode, "selects")) selects();
    else if (!strcmp(mode, "namespaces")) namespaces();
    else if (!strcmp(mode, "cancelled")) cancelled();
    else if (!strcmp(mode, "disconnected")) disconnected();
    else if (!strcmp(mode, "rooted")) rooted();
    else if (!strcmp(mode, "filtered")) filtered();
    else if (!strcmp(mode, "closes")) CHECK(close(fd) == 0);
    else if (!strcmp(mode, "no-memory")) addresses();
    else CHECK(!strcmp(mode, "no-files"));
    printf("done\n");
    return 0;
}
