// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Readiness, signals and time.

use std::ffi::c_int;
use std::mem::zeroed;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{fd, named, names, ok, ret};
use crate::script::Words;

/// `poll [NAME:]EVENTS... MILLISECONDS`
fn poll(op: &str, words: &mut Words<'_>) -> String {
    let mut all = words.all();
    let millis: i32 = all.pop().unwrap().parse().unwrap();
    let asked: Vec<_> =
        all.iter().map(|word| word.split_once(':').unwrap_or(("x", word))).collect();
    let entry = |(name, events): &(&str, &str)| libc::pollfd {
        fd: fd(name),
        events: names::poll_events(events),
        revents: 0,
    };
    let mut list: Vec<_> = asked.iter().map(entry).collect();
    let n = list.len() as u64;
    let time = libc::timespec {
        tv_sec: i64::from(millis / 1000),
        tv_nsec: i64::from(millis % 1000) * 1_000_000,
    };
    let mask: libc::sigset_t = unsafe { zeroed() };
    let done = unsafe {
        match op {
            "poll" => libc::poll(list.as_mut_ptr(), n, millis),
            _ => libc::ppoll(list.as_mut_ptr(), n, &time, &mask),
        }
    };
    if done < 0 {
        return ret(-1);
    }
    let shown = asked.iter().zip(&list).filter(|(_, entry)| entry.revents != 0);
    let shown: Vec<_> = shown
        .map(|((name, _), entry)| format!("{name}:{}", names::show_poll(entry.revents)))
        .collect();
    format!("{done} {}", shown.join(" "))
}

/// `select r:NAME w:NAME e:NAME... MILLISECONDS`
fn select(op: &str, words: &mut Words<'_>) -> String {
    let mut all = words.all();
    let millis: i64 = all.pop().unwrap().parse().unwrap();
    let mut sets: [libc::fd_set; 3] = unsafe { zeroed() };
    let which = |set: &str| ["r", "w", "e"].iter().position(|known| *known == set).unwrap();
    let asked: Vec<_> = all
        .iter()
        .map(|word| word.split_once(':').unwrap())
        .map(|(set, name)| (which(set), fd(name), format!("{set}:{name}")))
        .collect();
    for (set, fd, _) in &asked {
        unsafe { libc::FD_SET(*fd, &mut sets[*set]) };
    }
    let most = asked.iter().map(|(_, fd, _)| *fd).max().unwrap_or(-1) + 1;
    let [reading, writing, exceptions] = &mut sets;
    let mut time = libc::timeval { tv_sec: millis / 1000, tv_usec: millis % 1000 * 1000 };
    let limit = libc::timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 };
    let mask: libc::sigset_t = unsafe { zeroed() };
    let done = unsafe {
        match op {
            "select" => libc::select(most, reading, writing, exceptions, &mut time),
            _ => libc::pselect(most, reading, writing, exceptions, &limit, &mask),
        }
    };
    if done < 0 {
        return ret(-1);
    }
    let shown = asked.iter().filter(|(set, fd, _)| unsafe { libc::FD_ISSET(*fd, &sets[*set]) });
    let shown: Vec<_> = shown.map(|(_, _, text)| text.as_str()).collect();
    format!("{done} {}", shown.join(" "))
}

/// The names of descriptors, by the number that their registrations carry.
static DATA: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// `epoll-add SET NAME EVENTS`, and the like.
fn epoll_control(op: &str, words: &mut Words<'_>) -> String {
    let (set, name) = (fd(&words.word()), words.word());
    let mut data = DATA.lock().unwrap();
    let mut event = libc::epoll_event {
        events: names::epoll_events(&words.word_or("0")),
        u64: data.len() as u64,
    };
    data.push(name.clone());
    let how = match op {
        "epoll-add" => libc::EPOLL_CTL_ADD,
        "epoll-mod" => libc::EPOLL_CTL_MOD,
        _ => libc::EPOLL_CTL_DEL,
    };
    ret(unsafe { libc::epoll_ctl(set, how, fd(&name), &mut event) } as isize)
}

/// `epoll-wait SET MILLISECONDS [MOST]`
fn epoll_wait(op: &str, words: &mut Words<'_>) -> String {
    let (set, millis) = (fd(&words.word()), words.number() as c_int);
    let most: c_int = words.word_or("16").parse().unwrap();
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
    let mask: libc::sigset_t = unsafe { zeroed() };
    let limit = libc::timespec {
        tv_sec: i64::from(millis / 1000),
        tv_nsec: i64::from(millis % 1000) * 1_000_000,
    };
    let list = events.as_mut_ptr();
    let n = unsafe {
        match op {
            "epoll-wait" => libc::epoll_wait(set, list, most, millis),
            "epoll-pwait2" => libc::epoll_pwait2(set, list, most, &limit, &mask),
            _ => libc::epoll_pwait(set, list, most, millis, &mask),
        }
    };
    let Ok(n) = usize::try_from(n) else { return ret(-1) };
    let names_of_data = DATA.lock().unwrap();
    let show = |event: &libc::epoll_event| {
        let (data, events) = (event.u64, event.events);
        format!("{}:{}", names_of_data[data as usize], names::show_epoll(events))
    };
    let mut shown: Vec<_> = events[..n].iter().map(show).collect();
    // The order of different descriptors is not defined.
    shown.sort();
    format!("{n} {}", shown.join(" "))
}

fn epoll(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    Some(match op {
        "epoll-create" => named(name, unsafe { libc::epoll_create1(0) }),
        "epoll-create-old" => named(name, unsafe { libc::epoll_create(words.number() as c_int) }),
        "epoll-add" | "epoll-mod" | "epoll-del" => epoll_control(op, words),
        "epoll-wait" | "epoll-pwait" | "epoll-pwait2" => epoll_wait(op, words),
        "epoll-add-null" => {
            let set = fd(&words.word());
            let none = std::ptr::null_mut();
            ok(unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd(&words.word()), none) }
                as isize)
        }
        "epoll-wait-null" => {
            let none = std::ptr::null_mut();
            ok(unsafe { libc::epoll_wait(fd(&words.word()), none, 4, 1000) } as isize)
        }
        _ => return None,
    })
}

static CAUGHT: [AtomicU32; 65] = [const { AtomicU32::new(0) }; 65];

extern "C" fn count(signal: c_int) {
    CAUGHT[signal as usize].fetch_add(1, Ordering::Relaxed);
}

/// `signal NAME count|restart|ignore|default`
fn set_handler(words: &mut Words<'_>) -> String {
    let signal = names::signal(&words.word());
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = match &*words.word() {
        "count" => count as extern "C" fn(c_int) as usize,
        "restart" => {
            action.sa_flags = libc::SA_RESTART;
            count as extern "C" fn(c_int) as usize
        }
        "ignore" => libc::SIG_IGN,
        _ => libc::SIG_DFL,
    };
    ret(unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } as isize)
}

/// Sends SIGALRM to this thread after a time.
fn alarm(millis: i64) -> String {
    let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let time = libc::timespec { tv_sec: 0, tv_nsec: millis * 1_000_000 };
    let timer = libc::itimerspec { it_interval: never, it_value: time };
    unsafe {
        let mut event: libc::sigevent = zeroed();
        (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_THREAD_ID, libc::SIGALRM);
        event.sigev_notify_thread_id = libc::gettid();
        let mut id: libc::timer_t = zeroed();
        libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut id);
        ret(libc::timer_settime(id, 0, &timer, std::ptr::null_mut()) as isize)
    }
}

/// Waits until a signal has been caught that is still to be counted.
fn await_signal(signal: c_int) -> String {
    let end = Instant::now() + Duration::from_secs(10);
    while CAUGHT[signal as usize].load(Ordering::Relaxed) == 0 {
        if Instant::now() > end {
            return "none".into();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    "ok".into()
}

pub(super) fn operate(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    Some(match op {
        "poll" | "ppoll" => poll(op, words),
        "select" | "pselect" => select(op, words),
        "signal" => set_handler(words),
        "alarm" => alarm(words.number()),
        "raise" => ret(unsafe { libc::raise(names::signal(&words.word())) } as isize),
        "caught" => {
            CAUGHT[names::signal(&words.word()) as usize].swap(0, Ordering::Relaxed).to_string()
        }
        "await" => await_signal(names::signal(&words.word())),
        "block" | "unblock" => unsafe {
            let mut mask: libc::sigset_t = zeroed();
            libc::sigaddset(&mut mask, names::signal(&words.word()));
            let how = if op == "block" { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
            ret(libc::pthread_sigmask(how, &mask, std::ptr::null_mut()) as isize)
        },
        "sleep" => {
            std::thread::sleep(Duration::from_millis(words.number() as u64));
            "ok".into()
        }
        _ => return epoll(op, name, words),
    })
}
