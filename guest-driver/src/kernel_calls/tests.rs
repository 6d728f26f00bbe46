// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use super::*;

#[cfg(target_arch = "x86_64")]
#[test]
fn the_number_of_a_call_is_the_constant_before_it() {
    let number = |code: &[u8]| machine::number_of_last(&[code, &[0x0f, 0x05]].concat());
    for (code, expected) in [
        // mov eax, 441
        (&[0xb8, 0xb9, 1, 0, 0][..], Some(Some(441))),
        // the same, with other registers set afterwards
        (&[0xb8, 0xe8, 0, 0, 0, 0x49, 0x89, 0xd2, 0x45, 0x31, 0xc0], Some(Some(232))),
        // xor eax, eax
        (&[0x31, 0xc0], Some(Some(0))),
        // push 1; pop rax
        (&[0x6a, 1, 0x58], Some(Some(1))),
        // mov rax, 45
        (&[0x48, 0xc7, 0xc0, 45, 0, 0, 0], Some(Some(45))),
        // mov rax, rdi
        (&[0x48, 0x89, 0xf8], Some(None)),
        // mov rax, [rbp - 8]
        (&[0x48, 0x8b, 0x45, 0xf8], Some(None)),
        // mov r8d, 0: another register
        (&[0x31, 0xc0, 0x41, 0xb8, 7, 0, 0, 0], Some(Some(0))),
        // a call changes it
        (&[0x31, 0xc0, 0xe8, 0, 0, 0, 0], Some(None)),
        // The bytes are an address or a constant.
        (&[0x8b, 0x05], None),
        (&[0xb8, 0, 0], None),
        (&[0xc5, 0xf8, 0x28, 0x05, 0, 0], None),
    ] {
        assert_eq!(number(code), expected, "{code:x?}");
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn calls_are_found_at_every_place_of_a_piece() {
    for len in [0, 1, 2, 63, 64, 65, 66, 127, 128, 129, 200] {
        for (at, pair) in (0..len).flat_map(|at| [(at, [0x0f, 0x05]), (at, [0xcd, 0x80])]) {
            // Halves of an instruction, and the bytes in the wrong order.
            let mut code: Vec<_> = [0x0f, 0x80, 0x05, 0x0f, 0xcd].repeat(len)[..len].to_vec();
            let Some(place) = code.get_mut(at..at + 2) else { continue };
            place.copy_from_slice(&pair);
            assert_eq!(machine::candidates(&code).collect::<Vec<_>>(), [at], "{len}");
        }
        assert_eq!(machine::candidates(&[0x0f].repeat(len)).count(), 0);
    }
}

/// A program that the compiler has made of these lines.
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
fn compiled(name: &str, lines: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir();
    let file = dir.join(format!("smc-kernel-calls-{name}-{}", std::process::id()));
    let source = file.with_extension("c");
    std::fs::write(&source, lines).unwrap();
    let mut cc = std::process::Command::new("cc");
    cc.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&file).arg(&source);
    assert!(cc.status().unwrap().success());
    std::fs::remove_file(source).unwrap();
    file
}

#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
#[test]
fn a_file_tells_which_calls_it_makes() {
    let of = |name: &str, body: &str| {
        let call = match cfg!(target_arch = "x86_64") {
            true => {
                "static long call(long n, long a) { long r; __asm__ volatile(\"syscall\" : \
                 \"=a\"(r) : \"a\"(n), \"D\"(a) : \"rcx\", \"r11\", \"memory\"); return r; }"
            }
            false => {
                "static long call(long n, long a) { register long x8 __asm__(\"x8\") = n, x0 \
                 __asm__(\"x0\") = a; __asm__ volatile(\"svc #0\" : \"+r\"(x0) : \"r\"(x8) : \
                 \"memory\"); return x0; }"
            }
        };
        let lines = format!("#include <unistd.h>\n#include <sys/syscall.h>\n{call}\n{body}\n");
        let file = compiled(name, &lines);
        let found = makes_socket_calls(&file);
        std::fs::remove_file(file).unwrap();
        found
    };
    assert!(of("read", "long f(int fd) { return call(SYS_read, fd); }"));
    assert!(of("wait", "long f(int fd) { return call(SYS_epoll_pwait, fd); }"));
    assert!(of("any", "long f(long n, int fd) { return call(n, fd); }"));
    assert!(!of("futex", "long f(int fd) { return call(SYS_futex, fd); }"));
    assert!(!of("getpid", "long f(int fd) { return fd + call(SYS_getpid, 0); }"));
    assert!(!of("libc", "long f(int fd, void *to) { return read(fd, to, 10); }"));
    // Rust.
    assert!(!makes_socket_calls(&std::env::current_exe().unwrap()));
    assert!(!makes_socket_calls(Path::new("/etc/passwd")));
}
